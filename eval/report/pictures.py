# SPDX-License-Identifier: Apache-2.0
"""Pictures of a report: accuracy against slots saved, and memory over time."""

from pathlib import Path

import pandas as pd

from eval.measures.accuracy import accuracy
from eval.report.style import LABEL_SIZE, figure, light_grid, look, save, text
from eval.report.tables import Data, groups

_SIDE = {"fontsize": LABEL_SIZE, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1, 1)}


def draw(data: Data, folder: Path) -> dict[str, str]:
    """Draw what there is to draw; captions by file name."""
    captions: dict[str, str] = {}
    for task in data.cells["task"].unique():
        for name, caption, drawer in (
            ("accuracy", "Accuracy against slots saved", _accuracy),
            ("timeline", "KV slots and running requests over time", _timeline),
        ):
            file = f"{name}_{task}.png"
            if drawer(data, task, folder / file):
                captions[file] = f"{caption}, {text(task)}"
    return captions


def _accuracy(data: Data, task: str, path: Path) -> bool:
    made, axes = figure(7.6, 4.4)
    one, methods = axes[0, 0], list(data.cells["method"].unique())
    drawn = set()
    for key, group in groups(data):
        found, saving = accuracy(data.results[key]), group["saving"].astype(float).median()
        if key[1] != task or found is None or pd.isna(saving):
            continue
        low, high = found.low or found.value, found.high or found.value
        error = [[found.value - low], [high - found.value]]
        label = "" if key[2] in drawn else text(key[2])
        style = look(methods.index(key[2]))
        one.errorbar(100 * saving, found.value, yerr=error, label=label, **style)
        drawn.add(key[2])
    if len(drawn) < 2:
        return False
    at = "KV slots saved, % of positions held, over decode steps"
    one.set(xlabel=at, ylabel="accuracy (95% interval)", ylim=(-0.03, 1.06))
    light_grid(one, "both")
    one.legend(**_SIDE)
    save(made, path)
    return True


def _timeline(data: Data, task: str, path: Path) -> bool:
    """The first seed of each method of the first run; means over at most 300 stretches."""
    rows = data.timeline[data.timeline["task"] == task] if len(data.timeline) else data.timeline
    if rows.empty:
        return False
    rows = rows[rows["run"] == rows["run"].iloc[0]]
    every = data.configs[rows["run"].iloc[0]].get("decode_log_interval", 1)
    made, axes = figure(8.5, 5.6, 2, 1)
    for number, (method, found) in enumerate(rows.groupby("method", sort=False)):
        found = found[found["seed"] == found["seed"].min()].reset_index(drop=True)
        stretch = found.index // max(1, len(found) // 300)
        means = found[["used", "saved", "running"]].groupby(stretch).mean()
        at = every * found.index.to_series().groupby(stretch).mean()
        colour, name = look(number)["color"], text(str(method))
        axes[0, 0].plot(at, means["used"], color=colour, label=f"{name}: in use")
        if means["saved"].any():
            axes[0, 0].plot(at, means["saved"], color=colour, linestyle=":", label=f"{name}: saved")
        axes[1, 0].plot(at, means["running"], color=colour, label=name)
    axes[0, 0].set_ylabel("KV slots (tokens)")
    axes[1, 0].set(ylabel="running requests", xlabel="decode step")
    for one in axes.flat:
        one.set_ylim(bottom=0)
        light_grid(one)
        one.legend(**_SIDE)
    save(made, path)
    return True
