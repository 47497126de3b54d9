# SPDX-License-Identifier: Apache-2.0
"""Files of recorded responses and of problems, as the programs of ``eval`` read them."""

import json
from pathlib import Path
from typing import Any


def write_rows(path: Path, *rows: Any) -> Path:
    """A JSONL file; a row that is text becomes a line as it is, whatever it says."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
