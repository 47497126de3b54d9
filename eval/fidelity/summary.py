# SPDX-License-Identifier: Apache-2.0
"""Sums up scores of responses: means with bootstrap intervals, and a table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

_RESAMPLES = 2000
#: Figure -> its format, and a function of the mean scores of an arm and of the first arm (dense or full).
Figures = Mapping[str, tuple[str, Callable[[Any, Any], Any]]]
RESPONSES: Figures = {
    "saved": ("{:.1%}", lambda arm, _: arm["saved"]),
    "kl": ("{:.4f}", lambda arm, _: arm["kl"]),
    "kl_per_saved": ("{:.4f}", lambda arm, _: arm["kl"] / arm["saved"]),
    "nll": ("{:+.2%}", lambda arm, dense: arm["nll"] / dense["nll"] - 1),
    "top1": ("{:.1%}", lambda arm, _: arm["top1"]),
}
DOCUMENTS: Figures = {
    "accuracy": ("{:.3f}", lambda arm, _: arm["accuracy"]),
    "f1": ("{:.3f}", lambda arm, _: arm["f1"]),
    "of_full": ("{:.2f}", lambda arm, full: arm["accuracy"] / full["accuracy"]),
    "kl": RESPONSES["kl"],
    "nll": ("{:.3f}", lambda arm, _: arm["nll"]),
    "recomputed": ("{:.1%}", lambda arm, _: arm["recomputed"]),
    "read": ("{:.1%}", lambda arm, _: arm["read"]),
}


def rows(
    records: Sequence[Mapping[str, Any]], figures: Figures = RESPONSES
) -> list[dict[str, Any]]:
    """A row of figures per group and arm. ``FIGURE_95`` is the figure's 95% bootstrap interval, or None if an
    end is not finite or the group has fewer than two responses. With ``RESPONSES``, dense has no row."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["group"], []).append(record["arms"])
    return [
        {"arm": name, "group": group, "responses": len(part), **_row(part, name, figures)}
        for group, part in groups.items()
        for name in list(part[0])[figures is RESPONSES :]
    ]


def _row(part: Sequence[Mapping[str, Any]], name: str, figures: Figures) -> dict[str, Any]:
    drawn = np.random.default_rng(0).integers(len(part), size=(_RESAMPLES, len(part)))
    both = [pd.DataFrame([arms[arm] for arms in part]) for arm in (name, next(iter(part[0])))]
    means = [scores.mean() for scores in both]
    resampled = [{key: scores[key].to_numpy()[drawn].mean(-1) for key in scores} for scores in both]
    row: dict[str, Any] = {}
    for figure, (_, compute) in figures.items():
        with np.errstate(divide="ignore", invalid="ignore"):
            value = compute(*means)
            ends = np.quantile(compute(*resampled), (0.025, 0.975))
        row[figure] = float(value) if np.isfinite(value) else None
        shown = len(part) > 1 and np.isfinite(ends).all()
        row[f"{figure}_95"] = ends.tolist() if shown else None
    return row


def table(summed: Sequence[Mapping[str, Any]], figures: Figures = RESPONSES) -> str:
    lines = []
    for row in summed:
        line = {name: row[name] for name in ("group", "arm", "responses")}
        for name, (form, _) in figures.items():
            ends = row[f"{name}_95"]
            line[name] = "-" if row[name] is None else form.format(row[name])
            line[name] += "" if ends is None else f" ({' to '.join(map(form.format, ends))})"
        lines.append(line)
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))
