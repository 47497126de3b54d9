# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.policy_picture TRACES``: the stages of the filter in one picture, ``docs/policy.png``.

What passes each stage is counted on the responses of TRACES, a JSONL file or a
folder of them; the distance stage needs a model and is shown at its default.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from eval.bench.filter import tokenized
from eval.redundancy.rows import texts_of
from sglang_reasoncache.filter.proposal import FilterCounters
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary

_BLOCK = 8


@dataclass(frozen=True)
class Stage:
    """One box: what it asks, what bounds it, which flags turn it, and what gets through."""

    name: str
    rule: str
    bound: str
    knobs: str
    passed: float
    passed_label: str


def count(
    config: FilterConfig, vocabulary: Vocabulary, streams: Sequence[Sequence[int]]
) -> FilterCounters:
    """Counters over all responses."""
    classes = TokenClasses(vocabulary)
    total = FilterCounters()
    for tokens in streams:
        request = RequestFilter(config, classes, vocabulary, 0)
        request.push(tokens)
        total.add(request.counters)
    return total


def stages(full: FilterCounters, prose: FilterCounters, tokens: int) -> list[Stage]:
    """The boxes. ``full``: with the structure check, ``prose``: without."""
    lexical = full.steps_with_candidates / full.steps
    # Steps that still have blocks to propose, of those that would without the check.
    formal = lexical * full.steps_with_pairs / max(1, prose.steps_with_pairs)
    return [
        Stage(
            "segment",
            "a step ends at a blank line",
            "1,024 tokens a step",
            "max-step-tokens\nspan",
            1.0,
            f"{full.steps:,} steps",
        ),
        Stage(
            "lexical",
            "cosine of token counts x length ratio > tau (0.9 to 0.7)",
            "2,048 earlier steps; 256 steps waiting",
            "tau-strict, tau-soft\nfixed-tau, encoder\nmax-pending",
            lexical,
            f"{lexical:.0%} of steps",
        ),
        Stage(
            "structure",
            "same trees where both steps are formal",
            "8,192 characters, depth 64, 1,024 nodes; over: no match",
            "use-structure\nstructure-tolerance",
            formal,
            f"{formal:.0%} of steps",
        ),
        Stage(
            "align",
            "blocks of d equal tokens",
            "4 sources, 256 blocks a step",
            "block, align",
            full.pairs * _BLOCK / tokens,
            f"{full.pairs * _BLOCK / tokens:.0%} of tokens (d = {_BLOCK})",
        ),
        Stage(
            "distance",
            "K and V within the p-th percentile of those seen",
            "256 blocks a wave, 2,560 bins",
            "percentile, warmup\nhalf-life, distance\npositions",
            0.8 * full.pairs * _BLOCK / tokens,
            "80% of those, at p = 80",
        ),
    ]


def draw(axes: Axes, boxes: Sequence[Stage], caption: str) -> None:
    """Boxes from left to right, a bar under each for what gets through."""
    width, gap = 1.0, 0.22
    axes.set_axis_off()
    axes.set_xlim(-0.05, len(boxes) * (width + gap) - gap + 0.05)
    axes.set_ylim(-1.95, 2.3)
    for i, box in enumerate(boxes):
        left = i * (width + gap)
        stage_2 = box.name == "distance"
        color = "#d9822b" if stage_2 else "#2b6cb0"
        axes.add_patch(
            plt.Rectangle((left, 0), width, 2.0, facecolor="white", edgecolor=color, lw=1.6)
        )
        axes.text(
            left + width / 2, 2.08, box.name, ha="center", va="bottom", weight="bold", color=color
        )
        wrapped = "\n".join(textwrap.wrap(box.rule, 19))
        axes.text(left + 0.06, 1.9, wrapped, va="top", fontsize=9)
        bound = "\n".join(textwrap.wrap(box.bound, 22))
        axes.text(left + 0.06, 1.06, f"bound\n{bound}", va="top", fontsize=7.5, color="#555555")
        axes.text(
            left + 0.06, 0.06, box.knobs, va="bottom", fontsize=7.5, family="monospace", color=color
        )
        if i:
            axes.annotate(
                "",
                (left, 1.0),
                (left - gap, 1.0),
                arrowprops={"arrowstyle": "-|>", "color": "#555555", "lw": 1.4},
            )
        height = 1.1 * box.passed
        axes.add_patch(
            plt.Rectangle((left, -1.45), width, height, facecolor=color, alpha=0.35, lw=0)
        )
        axes.text(left + width / 2, -1.5, box.passed_label, ha="center", va="top", fontsize=8.5)
    axes.text(0, -1.95, caption, va="top", fontsize=8, color="#555555")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.policy_picture", description=__doc__.splitlines()[0]
    )
    parser.add_argument("traces", type=Path, help="JSONL file of responses, or folder of them.")
    parser.add_argument("--output", type=Path, default=Path("docs/policy.png"))
    options = parser.parse_args(argv)
    files = sorted(options.traces.glob("*.jsonl")) if options.traces.is_dir() else [options.traces]
    texts = texts_of(files)
    vocabulary, streams = tokenized(None, texts)
    config = FilterConfig(block=_BLOCK)
    full = count(config, vocabulary, streams)
    prose = count(replace(config, use_structure=False), vocabulary, streams)
    figure, axes = plt.subplots(figsize=(11, 4.6))
    names = " and ".join(path.stem for path in files)
    draw(
        axes,
        stages(full, prose, sum(map(len, streams))),
        f"Bars: what gets through, of {len(texts)} responses in {names}. "
        "Blue: on the host, beside the scheduler. Orange: over the KV pool.",
    )
    figure.savefig(options.output, dpi=130, bbox_inches="tight")
    print(f"wrote {options.output}: {full}")


if __name__ == "__main__":
    main()
