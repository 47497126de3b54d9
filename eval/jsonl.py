# SPDX-License-Identifier: Apache-2.0
"""Lines of JSONL files that anybody may have written."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

_Row = TypeVar("_Row")
MAX_LINE_BYTES = 16 << 20


def read_lines(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of the lines that are not blank, one in memory at a time; of one that is
    too long for :func:`read_object` only the beginning."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            if line.strip():
                yield number, line
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)


def read_object(line: bytes, max_bytes: int = MAX_LINE_BYTES) -> dict[str, Any]:
    """The object that one line holds. Raises ValueError: says what is wrong with the line; who
    calls knows its file and number."""
    if len(line.removesuffix(b"\n")) > max_bytes:
        raise ValueError(f"longer than {max_bytes} bytes")
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, brackets nested thousands deep.
        raise ValueError(f"not JSON that can be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"not an object but {kind_of(content)}")
    return content


def read_rows(
    path: Path,
    made: Callable[[dict[str, Any]], _Row],
    max_bytes: int = MAX_LINE_BYTES,
    complain: Callable[[str, str], None] | None = None,
) -> Iterator[tuple[int, _Row]]:
    """Numbers of lines and what ``made`` makes of their objects. Where a line cannot be read, or
    ``made`` raises ValueError, ``complain`` is called with ``file:line`` and the fault. Raises
    OSError; without ``complain`` ValueError, which names file and line."""
    for number, line in read_lines(path, max_bytes):
        try:
            row = made(read_object(line, max_bytes))
        except ValueError as error:
            if complain is None:
                raise ValueError(f"{path}:{number}: {error}") from error
            complain(f"{path}:{number}", str(error))
        else:
            yield number, row


def text_of(row: Mapping[str, Any], *names: str) -> str:
    """Text of the first of ``names`` that the row has, as valid Unicode. Raises ValueError if it has none
    of them, or if that is no text or empty."""
    name = next((name for name in names if row.get(name) is not None), names[0])
    if name not in row:
        raise ValueError(f"no field {name!r}")
    if not isinstance(row[name], str):
        raise ValueError(f"field {name!r} is no text but {kind_of(row[name])}")
    if not row[name].strip():
        raise ValueError(f"field {name!r} is no text: it is empty")
    return valid_text(row[name])


def texts_of(paths: Iterable[Path]) -> list[str]:
    """Field ``response`` of all lines. Raises OSError; ValueError: a bad line, which it names, or no
    response at all."""
    rows = (read_rows(path, lambda row: text_of(row, "response")) for path in paths)
    found = [text for texts in rows for _, text in texts]
    if not found:
        raise ValueError("no response in the files")
    return found


def kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")


def one_line(text: str, most: int) -> str:
    """Text of any content in one line of at most so many characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def valid_text(text: str) -> str:
    """Half surrogates, which pass through JSON and nothing else, become question marks."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
