# SPDX-License-Identifier: Apache-2.0
"""The figure: shares of similar steps, and the distribution behind them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from eval.redundancy.measure import BINS, LEVELS, Totals

#: More groups than this make no readable figure; the largest are drawn.
MAX_GROUPS = 6


def draw(groups: dict[str, Totals], path: Path) -> None:
    """Write the figure as PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    largest = sorted(groups, key=lambda name: -groups[name].later_steps)[:MAX_GROUPS]
    names = [name for name in groups if name in largest]
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    bars, curves = figure.subplots(1, 2, width_ratios=(5, 4))

    kinds = [(factor, level) for level in LEVELS for factor in (True, False)]
    width = 0.8 / len(kinds)
    for k, (factor, level) in enumerate(kinds):
        heights = [100 * _over(groups[name], factor, level) for name in names]
        at = np.arange(len(names)) + (k - (len(kinds) - 1) / 2) * width
        drawn = bars.bar(
            at,
            heights,
            width * 0.92,
            color=colours[0 if level == LEVELS[0] else 1],
            alpha=1 if factor else 0.45,
            label=f"> {level}, {'with length ratio' if factor else 'cosine alone'}",
        )
        bars.bar_label(drawn, fmt="%.0f", fontsize=8, padding=1)
    bars.set_xticks(
        range(len(names)), [_plain(name) for name in names], rotation=12 * (len(names) > 3)
    )
    bars.set_ylim(0, 118)
    bars.set_yticks(range(0, 101, 20))
    bars.set_ylabel("steps, % of all but the first")
    bars.set_title("Steps that resemble an earlier one of their response", fontsize=11)
    bars.legend(ncols=2, fontsize=8, loc="upper center", frameon=False)

    edges = np.arange(BINS) / BINS
    for name, colour in zip(names, colours[2:], strict=False):
        for factor in (True, False):
            counts = groups[name].best[factor]
            at_least = counts[::-1].cumsum()[::-1] / max(1, counts.sum())
            curves.plot(
                edges,
                100 * at_least,
                color=colour,
                linestyle="-" if factor else ":",
                label=_plain(name) if factor else None,
            )
    curves.plot([], [], color="grey", linestyle=":", label="cosine alone")
    for level in LEVELS:
        curves.axvline(level, color="lightgrey", linewidth=0.8, zorder=0)
    curves.set_xlim(0, 1)
    curves.set_ylim(0, 101)
    curves.set_xlabel("best similarity to an earlier step, at least")
    curves.set_ylabel("steps, % of all but the first")
    curves.set_title("Distribution of that similarity", fontsize=11)
    curves.legend(fontsize=8, frameon=False, loc="lower left")
    for axes in (bars, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _over(totals: Totals, factor: bool, level: float) -> float:
    return totals.over[factor, level] / max(1, totals.later_steps)


def _plain(name: str) -> str:
    """Matplotlib reads formulas between dollar signs."""
    return name.replace("$", r"\$")
