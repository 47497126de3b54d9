# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.sweep --budgets 48000,12000,3000 --out DIR [flags of eval.run]``: one run a KV budget.

``python -m eval.report DIR/kv-*`` then shows where the gain of sharing starts, peaks and ends.
A sweep that was stopped goes on."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval import run
from eval.runs.options import with_values

_AT_ONCE = (2, 130)  # statuses of a bad command line and of Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one budget after the other; exit status of the first run that was not whole. Only a bad
    command line and Ctrl-C keep later budgets from being tried."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.sweep",
        description=__doc__.splitlines()[0],
        epilog="All other flags go to python -m eval.run.",
        allow_abbrev=False,
    )
    parser.add_argument("--budgets", type=_budgets, required=True, metavar="SLOTS,SLOTS,...")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    words = sys.argv[1:] if argv is None else argv
    args, rest = parser.parse_known_args(with_values(words, ("--server-flags",)))
    taken = [flag for flag in rest if flag.partition("=")[0] in ("--kv-budget", "--resume")]
    if taken:
        parser.error(f"{taken[0]} does not go with --budgets")
    folders = [args.out / f"kv-{budget}" for budget in args.budgets]
    first = 0
    for budget, folder in zip(args.budgets, folders, strict=True):
        status = run.main([*rest, "--kv-budget", str(budget), "--out", str(folder)])
        if status in _AT_ONCE:
            return status
        first = first or status
    print("python -m eval.report " + " ".join(map(str, folders)))
    return first


def _budgets(text: str) -> list[int]:
    parts = text.split(",")
    budgets = [int(part) for part in parts if part.strip().isdecimal()]
    if len(set(budgets)) < len(parts) or min(budgets) < 1:
        what = "must be different numbers of KV slots of at least 1"
        raise argparse.ArgumentTypeError(f"{what}, got {text!r}")
    return budgets


if __name__ == "__main__":
    sys.exit(main())
