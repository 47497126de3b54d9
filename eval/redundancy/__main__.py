# SPDX-License-Identifier: Apache-2.0
"""Command line of the redundancy figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from eval.redundancy.measure import Totals, measure
from eval.redundancy.plot import draw
from eval.redundancy.report import as_json, as_markdown
from eval.redundancy.rows import Row, read_rows
from eval.redundancy.spelling import WORDS, Speller, TokenizerSpeller, WordSpeller

ALL = "all"
_OTHER = "other"
_MAX_DATASETS = 50
_MAX_COMPLAINTS = 20


class Collection:
    """Totals of all responses and of each dataset, split by correctness where it is known."""

    def __init__(self) -> None:
        self.all = Totals()
        self._datasets: dict[str, dict[bool | None, Totals]] = {}

    def add(self, row: Row, found: Totals) -> None:
        """Count one response. Datasets beyond the 50th go together."""
        name = row.dataset
        if name not in self._datasets and len(self._datasets) >= _MAX_DATASETS:
            name = _OTHER
        by_correct = self._datasets.setdefault(name, {})
        self.all.add(found)
        by_correct.setdefault(row.correct, Totals()).add(found)

    def datasets(self) -> dict[str, Totals]:
        """One group for each dataset."""
        found: dict[str, Totals] = {}
        for name, by_correct in self._datasets.items():
            found[name] = Totals()
            for totals in by_correct.values():
                found[name].add(totals)
        return found

    def groups(self) -> dict[str, Totals]:
        """All responses, each dataset, and its correct and wrong ones if it has both."""
        found = {f"{ALL} of them": self.all}
        for name, totals in self.datasets().items():
            found[name] = totals
            by_correct = self._datasets[name]
            if True in by_correct and False in by_correct:
                found[f"{name}, correct"] = by_correct[True]
                found[f"{name}, wrong"] = by_correct[False]
        return found


class Complaints:
    """Says what is wrong with lines, each with file and number, not more than a screenful."""

    def __init__(self) -> None:
        self.count = 0

    def about(self, path: Path, number: int, fault: str) -> None:
        """One line that is left out."""
        self.count += 1
        if self.count <= _MAX_COMPLAINTS:
            print(f"{path}:{number}: left out: {fault}", file=sys.stderr)
        elif self.count == _MAX_COMPLAINTS + 1:
            print("further lines are left out silently", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write; 0, or 1 with a message if there is nothing to measure."""
    args = _arguments(arguments)
    try:
        speller: Speller = (
            WordSpeller() if args.tokenizer == WORDS else TokenizerSpeller(args.tokenizer)
        )
        args.out.mkdir(parents=True, exist_ok=True)
        collection, complaints = Collection(), Complaints()
        for path in args.traces:
            _measure_file(path, args, speller, collection, complaints)
        if not collection.all.responses:
            raise ValueError(f"no responses in {', '.join(map(str, args.traces))}")
        groups = collection.groups()
        table = as_markdown(groups, speller.name, complaints.count)
        (args.out / "redundancy.md").write_text(table, encoding="utf-8")
        content = {
            "tokenizer": speller.name,
            "lines_left_out": complaints.count,
            "groups": {name: as_json(totals) for name, totals in groups.items()},
        }
        (args.out / "redundancy.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        draw(collection.datasets(), args.out / "redundancy.png")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table)
    return 0


def _measure_file(
    path: Path,
    args: argparse.Namespace,
    speller: Speller,
    collection: Collection,
    complaints: Complaints,
) -> None:
    def complain(number: int, fault: str) -> None:
        complaints.about(path, number, fault)

    shows_progress = sys.stderr.isatty()
    for row in read_rows(path, args.field, args.max_line_bytes, complain):
        collection.add(row, measure(speller.spell(row.response)))
        if shows_progress:
            print(f"\r{path.name}: {collection.all.responses}", end="\r", file=sys.stderr)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.redundancy",
        description="How often the steps of responses repeat earlier ones (the papers' Figure 2), and "
        "how many tokens stage 1 would propose to share. Writes redundancy.md, .json and .png.",
    )
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACES", help="JSONL files")
    parser.add_argument(
        "--tokenizer",
        default=WORDS,
        help=f"folder of a Hugging Face tokenizer, or {WORDS!r}: words and punctuation marks",
    )
    parser.add_argument("--field", default="response", help="the field with the response")
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="default: here")
    parser.add_argument("--max-line-bytes", type=_positive, default=64 << 20, metavar="N")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
