# SPDX-License-Identifier: Apache-2.0
"""Pictures of a report: accuracy against slots saved, and memory over time."""

from pathlib import Path
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.jsonl import one_line
from eval.measures.accuracy import accuracy
from eval.report.tables import Data, groups

sns.set_palette("colorblind")
_SIDE = {"fontsize": 8.5, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1, 1)}


def draw(data: Data, folder: Path) -> dict[str, str]:
    """Draw the pictures for which there are data. Returns captions by file name."""
    captions: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    for task in data.cells["task"].unique():
        for name, caption, drawer in (
            ("accuracy", "Accuracy against slots saved", _accuracy),
            ("timeline", "KV slots and running requests over time", timeline),
        ):
            file = f"{name}_{task}.png"
            if drawer(data, task, folder / file):
                captions[file] = f"{caption}, {_text(task)}"
    return captions


def _accuracy(data: Data, task: str, path: Path) -> bool:
    rows = []
    for key, group in groups(data):
        estimate = accuracy(data.results[key])
        saving = group["saving"].astype(float).median()
        if key[1] == task and estimate is not None and not pd.isna(saving):
            low = estimate.low or estimate.value
            high = estimate.high or estimate.value
            row = {"method": _text(key[2]), "saved": 100 * saving, "accuracy": estimate.value}
            # If the accuracy is 0 or 1, rounding may put a bound of its interval on the wrong side of 0 or 1.
            bars = {"down": max(estimate.value - low, 0.0), "up": max(high - estimate.value, 0.0)}
            rows.append({**row, **bars})
    shown = pd.DataFrame(rows, columns=["method", "saved", "accuracy", "down", "up"])
    if shown["method"].nunique() < 2:
        return False
    made, (plot,) = _figure(7.6, 4.4)
    error = shown[["down", "up"]].T
    plot.errorbar(shown["saved"], shown["accuracy"], yerr=error, fmt="none", ecolor="#999999")
    sns.scatterplot(shown, x="saved", y="accuracy", hue="method", style="method", s=60, ax=plot)
    at = "KV slots saved, % of positions held, over decode steps"
    plot.set(xlabel=at, ylabel="accuracy (95% interval)", ylim=(-0.03, 1.06))
    plot.legend(**_SIDE)
    made.savefig(path, dpi=150)
    return True


def timeline(data: Data, task: str, path: Path) -> bool:
    """Draw KV slots and running requests over time, as rolling means, for the first run and each method's first
    seed. A mean spans 1/300 of the decode steps. Returns False if there is nothing to draw."""
    rows = data.timeline[data.timeline["task"] == task] if len(data.timeline) else data.timeline
    if rows.empty:
        return False
    rows = rows[rows["run"] == rows["run"].iloc[0]]
    every = data.configs[rows["run"].iloc[0]].get("decode_log_interval", 1)
    lines = []
    for method, moments in rows.groupby("method", sort=False):
        moments = moments[moments["seed"] == moments["seed"].min()].reset_index(drop=True)
        means = moments[["used", "saved", "running"]].rolling(1 + len(moments) // 300).mean()
        lines.append(means.assign(method=_text(str(method)), step=every * moments.index))
    shown = pd.concat(lines, ignore_index=True)
    made, (slots, requests) = _figure(8.5, 5.6, 2)
    looks: dict[str, Any] = {"x": "step", "hue": "method", "errorbar": None}
    sns.lineplot(shown, y="used", ax=slots, **looks)
    sns.lineplot(shown, y="saved", ax=slots, linestyle=":", legend=False, **looks)
    sns.lineplot(shown, y="running", ax=requests, **looks)
    slots.set(ylabel="KV slots (tokens); dotted: saved", xlabel="")
    requests.set(ylabel="running requests", xlabel="decode step")
    for plot in (slots, requests):
        plot.set_ylim(bottom=0)
        plot.legend(**_SIDE)
    made.savefig(path, dpi=150)
    return True


def _figure(width: float, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of this size in inches, and its axes from top to bottom."""
    made = Figure(figsize=(width, height), layout="constrained")
    axes = [*made.subplots(rows, 1, squeeze=False).flat]
    for plot in axes:
        plot.spines[["top", "right"]].set_visible(False)
        plot.tick_params(labelsize=9)
        plot.grid(color="#EBEBEB", linewidth=0.8)
        plot.set_axisbelow(True)
    return made, axes


def _text(name: str) -> str:
    """Converts any name into one short line for a picture. Escapes ``$``, which would begin a formula."""
    return one_line(name, 34).replace("$", r"\$")
