# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.replay FILE...``: makes the model that replays of these responses run on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval.redundancy.rows import read_rows
from eval.replay.model import build

#: Under the folder from which the command is called.
MODELS = Path("build/replay")
_MAX_LINE_BYTES = 16 << 20


def texts_of(paths: Sequence[Path]) -> list[str]:
    """The responses of JSONL files.

    Raises:
        ValueError: a bad line, or no response at all; names the file.
    """
    found = []
    for path in paths:

        def complain(number: int, fault: str, path: Path = path) -> None:
            raise ValueError(f"{path}:{number}: {fault}")

        found += [row.response for row in read_rows(path, "response", _MAX_LINE_BYTES, complain)]
    if not found:
        raise ValueError(f"no response in {', '.join(map(str, paths))}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.replay", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, default=MODELS, help=f"default {MODELS}")
    args = parser.parse_args(argv)
    try:
        folder = build(args.out, texts_of(args.files))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(folder)


if __name__ == "__main__":
    main()
