# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.replay FILE...``: makes the model that replays of these responses run on."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval.jsonl import texts_of
from eval.replay.model import build

#: Under the folder from which the command is called.
MODELS = Path("build/replay")


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
