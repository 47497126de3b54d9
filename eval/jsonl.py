# SPDX-License-Identifier: Apache-2.0
"""Reads JSONL files that anybody may have written, so any line may be bad."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

_Row = TypeVar("_Row")


def read_rows(
    path: Path,
    made: Callable[[dict[str, Any]], _Row],
    complain: Callable[[str, str], None] | None = None,
) -> Iterator[tuple[int, _Row]]:
    """Yields ``(line number, made(object))`` for each line that is not blank. If a line is no JSON object, or
    ``made`` raises ValueError, calls ``complain`` with ``file:line`` and the fault. Without ``complain``,
    raises a ValueError that names file and line. Raises OSError if the file cannot be read."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = made(_object(line))
            except ValueError as error:
                if complain is None:
                    raise ValueError(f"{path}:{number}: {error}") from error
                complain(f"{path}:{number}", str(error))
            else:
                yield number, row


def _object(line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # Numbers of thousands of digits and brackets nested thousands deep also end here.
        raise ValueError(f"not JSON: {one_line(str(error), 200)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"not an object but {type(content).__name__}")
    return content


def text_of(row: Mapping[str, Any], *names: str) -> str:
    """The text of the first field of ``names`` that the row has, as valid Unicode. Raises ValueError if the row
    has none of these fields, or if the field is empty or no text."""
    name = next((name for name in names if row.get(name) is not None), names[0])
    if name not in row:
        raise ValueError(f"no field {name!r}")
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"field {name!r} is no text, or empty")
    return valid_text(row[name])


def texts_of(paths: Iterable[Path]) -> list[str]:
    """The field ``response`` of every line of the files. Raises OSError if a file cannot be read. Raises
    ValueError if there is no response, or if a line is bad; the message then names that line."""
    rows = (read_rows(path, lambda row: text_of(row, "response")) for path in paths)
    responses = [text for texts in rows for _, text in texts]
    if not responses:
        raise ValueError("no response in the files")
    return responses


def cut_unfinished(path: Path) -> None:
    """Cut off the last line if it does not end in a newline, because then its writer was killed."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def one_line(text: str, most: int) -> str:
    """Returns any text as one line of at most ``most`` printable characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def valid_text(text: str) -> str:
    """Replaces lone surrogates, which JSON can carry but UTF-8 cannot, by question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
