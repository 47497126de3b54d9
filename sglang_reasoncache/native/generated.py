# SPDX-License-Identifier: Apache-2.0
"""C++ headers written at build time from Python's own tables, so that both engines agree."""

from __future__ import annotations

import importlib
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

# Header -> module of this package whose ``header_text()`` gives its text.
_HEADERS = {"unicode_tables.h": "unicode_tables", "vocabulary_tables.h": "vocabulary_tables"}


def headers() -> dict[str, str]:
    """Text of every generated header by its file name."""
    return {
        name: importlib.import_module(f"{__package__}.{module}").header_text()
        for name, module in _HEADERS.items()
    }


def inputs() -> list[Path]:
    """The files that decide what :func:`headers` returns, besides the interpreter."""
    modules = [_FOLDER / f"{module}.py" for module in _HEADERS.values()]
    # The vocabulary's header comes out of running the Python reader.
    return [*modules, *(_FOLDER.parent / "policy" / "structure").glob("*.py")]
