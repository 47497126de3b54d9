# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.recorded_siblings RESPONSES.jsonl``: what recorded responses to the same question
would save together, every block shared that the plugin's filter proposes. No model, no server."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.bench import at_least
from eval.bench.filter import tokenized
from eval.fidelity.siblings import Slots, proposals
from eval.jsonl import read_rows, text_of
from sglang_reasoncache.config import ReasonCacheConfig, filter_config
from sglang_reasoncache.filter.vocabulary import Vocabulary


def shared(
    vocabulary: Vocabulary, siblings: Sequence[Sequence[int]], stay: bool = False
) -> list[tuple[float, ...]]:
    """Of each response of a group, by the default settings: share of its positions without a slot
    of their own at its end, of those with a sibling's slot, and of the former the mean over its
    tokens. ``stay``: those that ended are read, too."""
    config = ReasonCacheConfig()
    rule = filter_config(config, config.block, 1)
    slots = [Slots(number) for number in range(len(siblings))]
    more = [np.zeros(len(tokens)) for tokens in siblings]
    group = len(siblings) > 1
    for written, number, step in proposals(rule, vocabulary, siblings, 0, group, stay):
        one, before = slots[number], slots[number].saved
        for dst, src, lender in [*((*pair, number) for pair in step.pairs), *step.across]:
            if one.claim(dst, rule.block):
                one.read(dst, src, rule.block, slots[lender])
        more[number][written - 1] += one.saved - before
    found: list[tuple[float, ...]] = []
    for one, gained in zip(slots, more, strict=True):
        count = len(gained)
        over = gained.cumsum() / np.arange(1, count + 1)
        found.append((over[-1], one.foreign(count) / count, over.mean()))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.bench.recorded_siblings")
    parser.add_argument("responses", type=Path, help="Rows with question, response and correct.")
    counts = "Responses that decode together (default 1 2 4)."
    parser.add_argument("--counts", type=at_least(1), nargs="+", default=(1, 2, 4), help=counts)
    stay = "Also read responses that have ended, as if their slots were kept."
    parser.add_argument("--stay", action="store_true", help=stay)
    options = parser.parse_args(argv)
    # Each row of the table is of the same responses.
    most = max(options.counts)
    if any(most % count for count in options.counts):
        parser.error(f"--counts must divide the largest, {most}, got {options.counts}")
    try:
        rows = [
            (text_of(row, "question"), text_of(row, "response"), row.get("correct") is True)
            for _, row in read_rows(options.responses, dict)
        ]
    except (OSError, ValueError) as error:
        parser.error(f"RESPONSES: {error}")
    vocabulary, streams = tokenized([response for _, response, _ in rows])
    questions: dict[str, list[int]] = {}
    for number, (question, *_) in enumerate(rows):
        questions.setdefault(question, []).append(number)
    lines: list[tuple[Any, ...]] = []
    for count in options.counts:
        for members in questions.values():
            some = members[: len(members) // most * most]
            for first in range(0, len(some), count):
                group = some[first : first + count]
                found = shared(vocabulary, [streams[number] for number in group], options.stay)
                for number, figures in zip(group, found, strict=True):
                    answer = "right" if rows[number][2] else "others"
                    lines.append((answer, count, len(streams[number]), *figures))
    if not lines:
        parser.error(f"RESPONSES: {options.responses} has no question with {most} responses")
    names = ["answer", "together", "tokens", "saved, end", "across, end", "saved, decode steps"]
    groups = pd.DataFrame(lines, columns=names).groupby(names[:2], sort=False)
    means = groups.mean().assign(responses=groups.size()).reset_index()
    for name in names[3:]:
        means[name] = means[name].map("{:.1%}".format)
    print(means.sort_values(names[:2]).to_markdown(index=False, floatfmt=".0f"))


if __name__ == "__main__":
    main()
