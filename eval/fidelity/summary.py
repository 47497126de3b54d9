# SPDX-License-Identifier: Apache-2.0
"""Scores of responses summed up: means with bootstrap intervals, a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

from eval.fidelity.responses import GROUPS
from eval.report.style import LABEL_SIZE, figure, light_grid, save, text

_RESAMPLES = 2000
#: Figure -> how a number of it is printed.
_FORMS = {
    "saved": "{:.1%}",
    "kl": "{:.4f}",
    "kl_per_saved": "{:.4f}",
    "nll": "{:+.2%}",
    "top1": "{:.1%}",
}
_MARKERS = "osD^vP*X<>ph"


def frame(records: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each response and arm, with the response's dense ``nll`` beside the arm's."""
    return pd.DataFrame(
        {
            "group": record["group"],
            "arm": name,
            **score,
            "dense": record["arms"]["dense"]["nll"],
        }
        for record in records
        for name, score in record["arms"].items()
        if name != "dense"
    )


def rows(scores: pd.DataFrame) -> list[dict[str, Any]]:
    """For each arm and group: means over responses, each with its 95% bootstrap interval.

    ``nll`` is the relative change of the mean, ``kl_per_saved`` the ratio of the means. An
    interval is null for fewer than two responses.
    """
    found = []
    for (arm, group), part in scores.groupby(["arm", "group"], sort=False):
        columns = tuple(part[name].to_numpy() for name in ("saved", "kl", "nll", "top1", "dense"))
        row = {"arm": arm, "group": group, "responses": len(part), **_figures(*columns)}
        for name, value in row.items():
            if isinstance(value, float) and not np.isfinite(value):
                row[name] = None
        for name, ends in _intervals(columns).items():
            row[f"{name}_95"] = ends
        found.append(row)
    return sorted(found, key=lambda row: GROUPS.index(row["group"]))


def _figures(
    saved: np.ndarray, kl: np.ndarray, nll: np.ndarray, top1: np.ndarray, dense: np.ndarray
) -> dict[str, float]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "saved": float(saved.mean()),
            "kl": float(kl.mean()),
            "kl_per_saved": float(np.divide(kl.mean(), saved.mean())),
            "nll": float(nll.mean() / dense.mean() - 1),
            "top1": float(top1.mean()),
        }


def _intervals(columns: Sequence[np.ndarray]) -> dict[str, list[float] | None]:
    if len(columns[0]) < 2:
        return dict.fromkeys(_FORMS)

    def statistic(*drawn: np.ndarray) -> np.ndarray:
        return np.array(list(_figures(*drawn).values()))

    interval = bootstrap(
        columns,
        statistic,
        n_resamples=_RESAMPLES,
        paired=True,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    ends = np.stack((interval.low, interval.high), axis=-1)
    return {
        name: pair.tolist() if np.isfinite(pair).all() else None
        for name, pair in zip(_FORMS, ends, strict=True)
    }


def table(summed: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; intervals in brackets."""
    lines = []
    for row in summed:
        line = {name: row[name] for name in ("group", "arm", "responses")}
        for name, form in _FORMS.items():
            ends = row[f"{name}_95"]
            value = "-" if row[name] is None else form.format(row[name])
            line[name] = value if ends is None else f"{value} ({'..'.join(map(form.format, ends))})"
        lines.append(line)
    return str(pd.DataFrame(lines).to_markdown(index=False))


def draw(summed: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Damage (KL) against slots saved, a panel for each group."""
    groups = list(dict.fromkeys(row["group"] for row in summed))
    arms = list(dict.fromkeys(row["arm"] for row in summed))
    made, axes = figure(5.2 * len(groups), 4.6, 1, len(groups))
    for panel, group in zip(axes[0], groups, strict=True):
        for row in (row for row in summed if row["group"] == group and row["kl"] > 0):
            number = arms.index(row["arm"])
            panel.errorbar(
                row["saved"],
                row["kl"],
                xerr=_error(row, "saved"),
                yerr=_error(row, "kl"),
                color=f"C{number % 10}",
                marker=_MARKERS[number % len(_MARKERS)],
                label=text(row["arm"]),
                elinewidth=0.8,
            )
        panel.set_yscale("log")
        panel.set_xlim(left=0)
        panel.set_title(group, fontsize=10)
        panel.set_xlabel("slots saved at the end, share of the response")
        light_grid(panel, "both")
    axes[0][0].set_ylabel("KL(dense || arm) a token, nats")
    axes[0][-1].legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)


def _error(row: Mapping[str, Any], name: str) -> list[list[float]] | None:
    ends = row[f"{name}_95"]
    if ends is None:
        return None
    return [[max(0.0, row[name] - ends[0])], [max(0.0, ends[1] - row[name])]]
