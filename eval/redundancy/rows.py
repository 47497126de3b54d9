# SPDX-License-Identifier: Apache-2.0
"""Responses out of JSONL files that anybody may have written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_MAX_NAME_CHARS = 40


class Row(NamedTuple):
    """One response.

    Attributes:
        dataset: the row's ``dataset``, else the file's name.
        correct: the row's ``correct`` where it is true or false.
        response: not empty, and valid Unicode.
    """

    dataset: str
    correct: bool | None
    response: str


def read_rows(
    path: Path, field: str, max_line_bytes: int, complain: Callable[[int, str], None]
) -> Iterator[Row]:
    """The responses of one file, one line in memory at a time.

    Args:
        path: one JSON object a line.
        field: the one that holds the response.
        max_line_bytes: longer lines are passed over.
        complain: called with the number and the fault of each line that is left out.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for number, line in _lines(file, max_line_bytes):
            if line is None:
                complain(number, f"longer than --max-line-bytes {max_line_bytes}")
            elif line.strip():
                try:
                    yield _row(line, field, path.stem)
                except ValueError as error:
                    complain(number, str(error))


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines; None for one that is too long."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) <= max_bytes or line.endswith(b"\n"):
            yield number, line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        yield number, None


def _row(line: bytes, field: str, file_name: str) -> Row:
    """Raises ValueError that says what is wrong with the line."""
    try:
        content = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, brackets nested thousands deep.
        raise ValueError(f"not JSON that can be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"not an object but {_kind(content)}")
    if field not in content:
        raise ValueError(f"no field {field!r}")
    response = content[field]
    if not isinstance(response, str):
        raise ValueError(f"field {field!r} is no text but {_kind(response)}")
    if not response.strip():
        raise ValueError(f"field {field!r} is empty")
    correct = content.get("correct")
    return Row(
        _name(content.get("dataset"), file_name),
        correct if isinstance(correct, bool) else None,
        # Half surrogates pass through JSON and nothing else.
        response.encode("utf-8", errors="replace").decode("utf-8"),
    )


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _name(value: Any, default: str) -> str:
    """A name that fits a table cell and a figure."""
    text = value if isinstance(value, str) else default
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (text or default)[:_MAX_NAME_CHARS]
