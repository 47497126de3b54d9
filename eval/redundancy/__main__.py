# SPDX-License-Identifier: Apache-2.0
"""Command line of the redundancy figures."""

import argparse
import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.jsonl import one_line, read_rows, text_of
from eval.redundancy.measure import WORDS, TokenizerSpeller, Totals, WordSpeller, measure
from eval.redundancy.report import as_json, as_markdown, draw

_OTHER = "other"
_MAX_DATASETS = 50
_MAX_COMPLAINTS = 20
_MAX_NAME_CHARS = 40


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; 0, or 1 with a message if there is nothing to measure."""
    args = _arguments(arguments)
    try:
        words = args.tokenizer == WORDS
        speller = WordSpeller() if words else TokenizerSpeller(args.tokenizer)
        args.out.mkdir(parents=True, exist_ok=True)
        found, left_out = _measure(args, speller)
        if not found:
            raise ValueError(f"no responses in {', '.join(map(str, args.traces))}")
        datasets = {name: sum(parts.values(), Counter()) for name, parts in found.items()}
        groups = _groups(found, datasets)
        table = as_markdown(groups, speller.name, left_out)
        (args.out / "redundancy.md").write_text(table, encoding="utf-8")
        content = {
            "tokenizer": speller.name,
            "lines_left_out": left_out,
            "groups": {name: as_json(totals) for name, totals in groups.items()},
        }
        (args.out / "redundancy.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        draw(datasets, args.out / "redundancy.png")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table)
    return 0


def _measure(
    args: argparse.Namespace, speller: WordSpeller | TokenizerSpeller
) -> tuple[dict[str, dict[bool | None, Totals]], int]:
    """Totals by dataset (beyond the 50th together) and correctness; how many lines were left out."""
    found: dict[str, dict[bool | None, Totals]] = {}
    left_out = itertools.count()

    def complain(where: str, fault: str) -> None:
        count = next(left_out)
        if count < _MAX_COMPLAINTS:
            print(f"{where}: left out: {fault}", file=sys.stderr)
        elif count == _MAX_COMPLAINTS:
            print("further lines are left out silently", file=sys.stderr)

    def made(row: dict[str, Any]) -> tuple[str, bool | None, str]:
        dataset, correct = row.get("dataset"), row.get("correct")
        # A name that fits a table cell and a figure.
        name = one_line(dataset, _MAX_NAME_CHARS) if isinstance(dataset, str) else ""
        return name, correct if isinstance(correct, bool) else None, text_of(row, args.field)

    for path in args.traces:
        rows = read_rows(path, made, args.max_line_bytes, complain)
        for _, (name, correct, response) in tqdm(rows, path.name, disable=None, unit=" responses"):
            name = name or one_line(path.stem, _MAX_NAME_CHARS)
            name = name if name in found or len(found) < _MAX_DATASETS else _OTHER
            totals = found.setdefault(name, {}).setdefault(correct, Counter())
            totals.update(measure(speller.spell(response)))
    return found, next(left_out)


def _groups(
    found: dict[str, dict[bool | None, Totals]], datasets: dict[str, Totals]
) -> dict[str, Totals]:
    """All responses, each dataset, and its correct and wrong ones if it has both."""
    groups = {"all of them": sum(datasets.values(), Counter())}
    for name, totals in datasets.items():
        groups[name] = totals
        if {True, False} <= set(found[name]):
            groups |= {f"{name}, correct": found[name][True], f"{name}, wrong": found[name][False]}
    return groups


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.redundancy",
        description="How often the steps of responses repeat earlier ones (the papers' Figure 2), and "
        "how many tokens stage 1 would propose to share. Writes redundancy.md, .json and .png.",
    )
    add = parser.add_argument
    tokenizer = f"folder of a Hugging Face tokenizer, or {WORDS!r}: words and punctuation marks"
    add("traces", nargs="+", type=Path, metavar="TRACES", help="JSONL files")
    add("--tokenizer", default=WORDS, help=tokenizer)
    add("--field", default="response", help="the field with the response")
    add("--out", type=Path, default=Path(), metavar="DIR", help="default: here")
    add("--max-line-bytes", type=int, default=64 << 20, metavar="N")
    args = parser.parse_args(arguments)
    if args.max_line_bytes < 1:
        parser.error(f"--max-line-bytes must be at least 1, got {args.max_line_bytes}")
    return args


if __name__ == "__main__":
    sys.exit(main())
