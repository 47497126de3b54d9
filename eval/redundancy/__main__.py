# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.redundancy``: how often the steps of responses repeat earlier ones (the papers' Figure
2), and how many tokens the filter would propose to share. Writes redundancy.md and .json."""

import itertools
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval import command
from eval.command import option
from eval.jsonl import one_line, read_rows, text_of
from eval.redundancy.measure import WORDS, TokenizerSpeller, Totals, WordSpeller, measure
from eval.redundancy.report import as_json, as_markdown

_OTHER = "other"
_MAX_DATASETS = 50
_MAX_COMPLAINTS = 20
_MAX_NAME_CHARS = 40


def work(options: "Options") -> None:
    """Measure, print, write. Raises ValueError: there is nothing to measure."""
    words = options.tokenizer == WORDS
    speller = WordSpeller() if words else TokenizerSpeller(options.tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    found, left_out = _measure(options, speller)
    if not found:
        raise ValueError(f"no responses in {', '.join(map(str, options.traces))}")
    datasets = {name: sum(parts.values(), Counter()) for name, parts in found.items()}
    groups = _groups(found, datasets)
    table = as_markdown(groups, speller.name, left_out)
    (options.out / "redundancy.md").write_text(table, encoding="utf-8")
    content = {
        "tokenizer": speller.name,
        "lines_left_out": left_out,
        "groups": {name: as_json(totals) for name, totals in groups.items()},
    }
    (options.out / "redundancy.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    print(table)


def _measure(
    args: "Options", speller: WordSpeller | TokenizerSpeller
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


@dataclass(frozen=True)
class Options:
    traces: tuple[Path, ...] = option(text="JSONL files")
    tokenizer: str = option(
        WORDS, f"folder of a Hugging Face tokenizer, or {WORDS!r}: words and punctuation marks"
    )
    field: str = option("response", "the field with the response")
    out: Path = option(Path(), "folder of the results")
    max_line_bytes: int = option(64 << 20, "longer lines are left out", least=1)


if __name__ == "__main__":
    command.run(Options, work)
