# SPDX-License-Identifier: Apache-2.0
"""Totals as Markdown tables, as JSON and as a picture."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eval.redundancy.measure import BINS, BLOCKS, LEVELS, RULES, SIMILARITIES, Totals
from eval.report.style import figure as new_figure
from eval.report.style import save, text

#: More groups than this make no readable picture; the largest are drawn.
MAX_GROUPS = 6

_STEPS = """
Steps that repeat an earlier one of their response: share of all steps but the first whose
best similarity exceeds the level (cosine of token counts times ratio of lengths; plain cosine).
"""
_SHAREABLE = """
What stage 1 would propose, before distances are looked at: share of steps with a candidate
over the dynamic threshold; share of response tokens in proposed blocks of d tokens at the end
of a response / averaged over decode steps, any candidate and candidates of equal structure.
"""


def as_json(totals: Totals) -> dict[str, Any]:
    later, tokens, held = (totals[name] for name in ("later_steps", "tokens", "held_over_time"))
    shareable: dict[str, dict[str, dict[str, float]]] = {rule: {} for rule in RULES}
    for rule, block in itertools.product(RULES, BLOCKS):
        end = _share(totals[rule, block], tokens)
        over = _share(totals[rule, block, "over_time"], held)
        shareable[rule][str(block)] = {"at_the_end": end, "over_decode_steps": over}
    histogram = {name: [totals[name, i] for i in range(BINS)] for name in SIMILARITIES}
    similar = {
        name: {str(v): _share(totals[name, v], later) for v in LEVELS} for name in SIMILARITIES
    }
    return {
        **{name: totals[name] for name in ("responses", "tokens", "steps", "later_steps")},
        "tokens_per_step": _share(tokens, totals["steps"]),
        "similar_steps": similar,
        "best_similarity_histogram": {"bin_width": 1 / BINS, **histogram},
        "steps_with_candidate": _share(totals["candidates"], later),
        "shareable_tokens": shareable,
    }


def as_markdown(groups: Mapping[str, Totals], tokenizer: str, left_out: int) -> str:
    """Two tables with one line a group, and what they say."""
    steps, shareable = [], []
    for name, totals in groups.items():
        found = as_json(totals)
        later, tokens = bool(totals["later_steps"]), bool(totals["tokens"])
        group = {"responses of": name.replace("|", "\\|")}
        sizes = {"number": totals["responses"], "steps": totals["steps"]}
        mean = {"tokens a step": f"{found['tokens_per_step']:.1f}"}
        similar = {
            f"{prefix}> {level}": _percent(found["similar_steps"][kind][str(level)], later)
            for kind, prefix in zip(SIMILARITIES, ("", "plain "), strict=True)
            for level in LEVELS
        }
        steps.append({**group, **sizes, **mean, **similar})
        proposed = {
            f"d = {block}, {rule}": " / ".join(_percent(share, tokens) for share in shares.values())
            for rule, blocks in found["shareable_tokens"].items()
            for block, shares in blocks.items()
        }
        candidate = _percent(found["steps_with_candidate"], later)
        shareable.append({**group, "candidate": candidate, **proposed})
    number = next(iter(groups.values()))["responses"]
    lines_out = f", {left_out} lines left out." if left_out else "."
    first, second = (
        pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)
        for lines in (steps, shareable)
    )
    head = f"Tokens: `{tokenizer}`. Responses: {number}{lines_out}\n"
    return f"{head}{_STEPS}\n{first}\n{_SHAREABLE}\n{second}\n"


def draw(groups: Mapping[str, Totals], path: Path) -> None:
    """Shares of similar steps, and the distribution behind them, as PNG. Raises OSError."""
    largest = sorted(groups, key=lambda name: -groups[name]["later_steps"])[:MAX_GROUPS]
    shown = {text(n): as_json(groups[n]) for n in groups if n in largest}
    made, ((bars, curves),) = new_figure(11, 4.4, 1, 2)
    shares = {
        (f"> {level}, {label}", name): 100 * found["similar_steps"][kind][str(level)]
        for level in LEVELS
        for kind, label in zip(SIMILARITIES, ("with length ratio", "cosine alone"), strict=True)
        for name, found in shown.items()
    }
    kinds = ["#0072B2", "#99C7E0", "#D55E00", "#EEBE99"]
    frame = pd.Series(shares).unstack(0, sort=False)
    frame.plot.bar(ax=bars, width=0.75, rot=12 * (len(shown) > 3), color=kinds)
    for drawn in bars.containers:
        bars.bar_label(drawn, fmt="%.0f", fontsize=8, padding=1)
    bars.set(ylim=(0, 118), yticks=range(0, 101, 20), ylabel="steps, % of all but the first")
    bars.set_title("Steps that resemble an earlier one of their response", fontsize=11)
    bars.legend(ncols=2, fontsize=8, loc="upper center", frameon=False)
    for number, (name, found) in enumerate(shown.items()):
        for kind, style in zip(SIMILARITIES, ("-", ":"), strict=True):
            counts = np.array(found["best_similarity_histogram"][kind])
            at_least = 100 * counts[::-1].cumsum()[::-1] / max(1, counts.sum())
            look: dict[str, Any] = dict(
                color=f"C{2 + number}", label=name if style == "-" else None
            )
            curves.plot(np.arange(BINS) / BINS, at_least, style, **look)
    curves.plot([], [], ":", color="grey", label="cosine alone")
    for level in LEVELS:
        curves.axvline(level, color="lightgrey", linewidth=0.8, zorder=0)
    curves.set(xlim=(0, 1), ylim=(0, 101), ylabel="steps, % of all but the first")
    curves.set_xlabel("best similarity to an earlier step, at least")
    curves.set_title("Distribution of that similarity", fontsize=11)
    curves.legend(fontsize=8, frameon=False, loc="lower left")
    save(made, path)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percent(share: float, known: bool) -> str:
    return f"{share:.1%}" if known else "-"
