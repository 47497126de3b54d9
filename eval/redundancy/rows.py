# SPDX-License-Identifier: Apache-2.0
"""Responses out of JSONL files that anybody may have written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from eval.jsonl import kind_of, read_object, valid_text

_MAX_NAME_CHARS = 40
_MAX_LINE_BYTES = 16 << 20


class Row(NamedTuple):
    """One response, not empty and valid Unicode.

    Attributes:
        dataset: the row's ``dataset``, else the file's name.
        correct: the row's ``correct`` where it is true or false.
    """

    dataset: str
    correct: bool | None
    response: str


def read_rows(
    path: Path, field: str, max_line_bytes: int, complain: Callable[[Path, int, str], None]
) -> Iterator[Row]:
    """The responses of one file, one line in memory at a time.

    Args:
        path: one JSON object a line.
        field: the one that holds the response.
        max_line_bytes: longer lines are passed over.
        complain: called with file, number and fault of each line that is left out.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, max_line_bytes), 1):
            if line is None:
                complain(path, number, f"longer than --max-line-bytes {max_line_bytes}")
            elif line.strip():
                try:
                    yield _row(line, field, path.stem)
                except ValueError as error:
                    complain(path, number, str(error))


def texts_of(paths: Iterable[Path]) -> list[str]:
    """The responses of JSONL files. Raises ValueError: a bad line, or no response at all; names the
    file."""

    def complain(path: Path, number: int, fault: str) -> None:
        raise ValueError(f"{path}:{number}: {fault}")

    rows = (row for path in paths for row in read_rows(path, "response", _MAX_LINE_BYTES, complain))
    found = [row.response for row in rows]
    if not found:
        raise ValueError("no response in the files")
    return found


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[bytes | None]:
    """None for a line that is too long."""
    while line := file.readline(max_bytes + 1):
        whole = len(line) <= max_bytes or line.endswith(b"\n")
        yield line if whole else None
        while not whole and line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)


def _row(line: bytes, field: str, file_name: str) -> Row:
    """Raises ValueError that says what is wrong with the line."""
    content = read_object(line)
    if field not in content:
        raise ValueError(f"no field {field!r}")
    response = content[field]
    if not isinstance(response, str):
        raise ValueError(f"field {field!r} is no text but {kind_of(response)}")
    if not response.strip():
        raise ValueError(f"field {field!r} is empty")
    correct = content["correct"] if isinstance(content.get("correct"), bool) else None
    return Row(_name(content.get("dataset"), file_name), correct, valid_text(response))


def _name(value: Any, default: str) -> str:
    """A name that fits a table cell and a figure."""
    text = value if isinstance(value, str) else default
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (text or default)[:_MAX_NAME_CHARS]
