# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.report RUN...``: the papers' tables and figures with the numbers of run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.report.data import load
from eval.report.document import write
from eval.report.page import Options
from eval.runs.folder import RunError


def main(argv: Sequence[str] | None = None) -> int:
    """Read, measure, draw, write; 0, or 1 with a message if a run cannot be read."""
    args = _parse(argv)
    options = Options(
        out=args.out or args.runs[0] / "report",
        heatmap_model="" if args.heatmap_model == "none" else args.heatmap_model,
        redundancy_responses=args.redundancy_responses,
        say=lambda text: print(text, file=sys.stderr),
    )
    try:
        path = write(load(args.runs), options)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(path)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.report",
        description="Writes REPORT.md, pictures and summary.json from folders of python -m eval.run. "
        "Several runs that differ in --kv-budget make a sweep.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: report/ in the first RUN")
    parser.add_argument(
        "--heatmap-model",
        metavar="DIR",
        help="folder of the Hugging Face model for the heat map, or none "
        "(default: the run's, if it is a local folder of less than 4 GiB)",
    )
    parser.add_argument(
        "--redundancy-responses",
        type=_positive,
        default=100,
        metavar="N",
        help="dense responses a task whose redundancy is measured (default 100)",
    )
    args = parser.parse_args(argv)
    folder = args.heatmap_model
    if folder not in (None, "none") and not Path(folder).is_dir():
        parser.error(f"--heatmap-model must be a folder or none, got {folder!r}")
    return args


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
