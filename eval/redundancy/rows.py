# SPDX-License-Identifier: Apache-2.0
"""Responses out of JSONL files that anybody may have written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from eval.jsonl import MAX_LINE_BYTES, kind_of, one_line, read_lines, read_object, valid_text

_MAX_NAME_CHARS = 40


class Row(NamedTuple):
    """One response, not empty and valid Unicode."""

    dataset: str  # the row's own, else the file's name
    correct: bool | None  # the row's own where it is true or false
    response: str


def read_rows(
    path: Path, field: str, max_line_bytes: int, complain: Callable[[Path, int, str], None]
) -> Iterator[Row]:
    """The responses, under ``field``, of one file; ``complain`` is called with file, number and
    fault of each line that is left out. Raises OSError: the file cannot be read."""
    for number, line in read_lines(path, max_line_bytes):
        try:
            yield _row(line, max_line_bytes, field, path.stem)
        except ValueError as error:
            complain(path, number, str(error))


def texts_of(paths: Iterable[Path]) -> list[str]:
    """The responses of JSONL files. Raises ValueError: a bad line, or no response at all; names the
    file."""

    def complain(path: Path, number: int, fault: str) -> None:
        raise ValueError(f"{path}:{number}: {fault}")

    rows = (row for path in paths for row in read_rows(path, "response", MAX_LINE_BYTES, complain))
    found = [row.response for row in rows]
    if not found:
        raise ValueError("no response in the files")
    return found


def _row(line: bytes, max_bytes: int, field: str, file_name: str) -> Row:
    content = read_object(line, max_bytes)
    if field not in content:
        raise ValueError(f"no field {field!r}")
    response = content[field]
    if not isinstance(response, str):
        raise ValueError(f"field {field!r} is no text but {kind_of(response)}")
    if not response.strip():
        raise ValueError(f"field {field!r} is empty")
    correct = content["correct"] if isinstance(content.get("correct"), bool) else None
    given = content.get("dataset")
    # A name that fits a table cell and a figure.
    name = one_line(given, _MAX_NAME_CHARS) if isinstance(given, str) else ""
    name = name or one_line(file_name, _MAX_NAME_CHARS)
    return Row(name, correct, valid_text(response))
