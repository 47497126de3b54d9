# SPDX-License-Identifier: Apache-2.0
"""Scores of responses summed up: means with bootstrap intervals, a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

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


def rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each group and arm: means over responses, and of each, ``_95``, the ends of its 95%
    bootstrap interval over responses, null for fewer than two.

    ``nll`` is the relative change of the mean, ``kl_per_saved`` the ratio of the means.
    """
    scores = pd.DataFrame(
        {"group": record["group"], "arm": name, **score, "dense": record["arms"]["dense"]["nll"]}
        for record in records
        for name, score in record["arms"].items()
        if name != "dense"
    )
    found = []
    for (group, arm), part in scores.groupby(["group", "arm"], sort=False):
        columns = [part[name].to_numpy() for name in ("saved", "kl", "nll", "top1", "dense")]
        values, ends = _figures(*columns), np.full((2, len(_FORMS)), np.nan)
        if len(part) > 1:
            ends = _interval(columns)
        row = {"arm": arm, "group": group, "responses": len(part)}
        for name, value, pair in zip(_FORMS, values, ends.T, strict=True):
            row[name] = float(value) if np.isfinite(value) else None
            row[f"{name}_95"] = pair.tolist() if np.isfinite(pair).all() else None
        found.append(row)
    return found


def _figures(
    saved: np.ndarray, kl: np.ndarray, nll: np.ndarray, top1: np.ndarray, dense: np.ndarray
) -> np.ndarray:
    """In the order of ``_FORMS``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.divide(kl.mean(), saved.mean())
    return np.array((saved.mean(), kl.mean(), each, nll.mean() / dense.mean() - 1, top1.mean()))


def _interval(columns: Sequence[np.ndarray]) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        found = bootstrap(
            columns,
            _figures,
            n_resamples=_RESAMPLES,
            paired=True,
            vectorized=False,
            method="percentile",
            rng=np.random.default_rng(0),
        )
    return np.stack(found.confidence_interval)


def table(summed: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; intervals in brackets."""
    lines = []
    for row in summed:
        line = {name: row[name] for name in ("group", "arm", "responses")}
        for name, form in _FORMS.items():
            ends = row[f"{name}_95"]
            line[name] = "-" if row[name] is None else form.format(row[name])
            line[name] += "" if ends is None else f" ({' to '.join(map(form.format, ends))})"
        lines.append(line)
    return str(pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True))


def draw(summed: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Damage (KL) against slots saved, a panel for each group."""
    shown = pd.DataFrame(row for row in summed if row["kl"] > 0)
    arms = list(dict.fromkeys(shown["arm"])) if len(shown) else []
    groups = list(shown.groupby("group", sort=False)) if arms else []
    made, axes = figure(5.2 * max(1, len(groups)), 4.6, 1, max(1, len(groups)))
    for panel, (group, part) in zip(axes[0], groups, strict=False):
        for row in part.to_dict("records"):
            number = arms.index(row["arm"])
            bars = {
                f"{axis}err": np.abs(np.array(row[f"{name}_95"])[:, None] - row[name])
                for axis, name in (("x", "saved"), ("y", "kl"))
                if row[f"{name}_95"] is not None
            }
            look = dict(color=f"C{number % 10}", marker=_MARKERS[number % len(_MARKERS)])
            panel.errorbar(row["saved"], row["kl"], **bars, **look, label=text(row["arm"]))
        panel.set_yscale("log")
        panel.set_title(group, fontsize=10)
        panel.set_xlabel("slots saved at the end, share of the response")
        light_grid(panel, "both")
    axes[0][0].set_ylabel("KL(dense || arm) a token, nats")
    axes[0][-1].legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)
