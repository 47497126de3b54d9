# SPDX-License-Identifier: Apache-2.0
"""Accuracy against saving, throughput against the KV budget, and memory over time."""

from pathlib import Path

import pandas as pd
import seaborn as sns

from eval.measures.accuracy import accuracy
from eval.report.style import GREY, LABEL_SIZE, colour, figure, light_grid, marker, save, text
from eval.report.tables import DENSE, Data, _by_budget, _groups, speedups

_SIDE = {"fontsize": LABEL_SIZE, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1, 1)}


def draw(data: Data, folder: Path) -> dict[str, str]:
    """Draw what there is to draw; captions by file name."""
    captions: dict[str, str] = {}
    for task in data.cells["task"].unique():
        for name, caption, drawer in (
            ("accuracy", "Accuracy against slots saved", _accuracy),
            ("kv_budget", "Throughput against the KV budget", _budget),
            ("timeline", "KV slots and running requests over time", _timeline),
        ):
            file = f"{name}_{task}.png"
            if drawer(data, task, folder / file):
                captions[file] = f"{caption}, {text(task)}"
    return captions


def _accuracy(data: Data, task: str, path: Path) -> bool:
    made, axes = figure(7.6, 4.4)
    one, methods = axes[0, 0], set()
    for key, group in _groups(data):
        found, saving = accuracy(data.results[key]), group["saving"].astype(float).median()
        if key[1] != task or found is None or pd.isna(saving):
            continue
        low, high = found.low or found.value, found.high or found.value
        one.errorbar(
            100 * saving,
            found.value,
            yerr=[[found.value - low], [high - found.value]],
            color=colour(key[2]),
            marker=marker(key[2]),
            label="" if key[2] in methods else text(group["title"].iloc[0]),
        )
        methods.add(key[2])
    if len(methods) < 2:
        return False
    at = "KV slots saved, % of positions held, over decode steps"
    one.set(xlabel=at, ylabel="accuracy (95% interval)", ylim=(-0.03, 1.06))
    light_grid(one, "both")
    one.legend(**_SIDE)
    save(made, path)
    return True


def _budget(data: Data, task: str, path: Path) -> bool:
    cells = _by_budget(data)
    cells = cells[cells["task"] == task].dropna(subset="tokens_per_s")
    if cells.empty:
        return False
    ratios = pd.concat([speedups(data, key) for key, _ in _groups(data)], keys=dict(_groups(data)))
    ratios = ratios.rename("ratio").rename_axis(["run", "task", "method", "seed"]).reset_index()
    cells = cells.merge(ratios, how="left")
    made, axes = figure(8.5, 6.4, 2, 1)
    looks = {method: colour(method) for method in cells["method"].unique()}
    labels = {"tokens_per_s": "output tokens/s", "ratio": "over dense's"}
    for row, (value, label) in enumerate(labels.items()):
        one = axes[row, 0]
        shown = cells if row == 0 else cells[cells["method"] != DENSE]
        sns.lineplot(
            shown.astype({value: float}),
            x="kv_slots", y=value, hue="method", style="method", palette=looks, markers=True,
            dashes=False, estimator="median", errorbar=("pi", 100), err_style="bars", ax=one,
        )  # fmt: skip
        slots = sorted(cells["kv_slots"].unique())
        one.set_xscale("log", base=2)
        one.set_xticks(slots, [f"{slot:,.0f}" for slot in slots])
        one.minorticks_off()
        one.set(ylabel=label, xlabel="KV slots that the servers had (one a token)" if row else "")
        light_grid(one)
        if one.get_legend_handles_labels()[0]:
            one.legend(**_SIDE)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_title(text(task), fontsize=11, loc="left")
    axes[1, 0].axhline(1, color=GREY, linestyle="--", linewidth=1)
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
    for method, found in rows.groupby("method", sort=False):
        found = found[found["seed"] == found["seed"].min()].reset_index(drop=True)
        stretch = found.index // max(1, len(found) // 300)
        means = found[["used", "saved", "running"]].groupby(stretch).mean()
        at = every * found.index.to_series().groupby(stretch).mean()
        axes[0, 0].plot(at, means["used"], color=colour(method), label=f"{text(method)}: in use")
        if means["saved"].any():
            label = f"{text(method)}: saved"
            axes[0, 0].plot(at, means["saved"], color=colour(method), linestyle=":", label=label)
        axes[1, 0].plot(at, means["running"], color=colour(method), label=text(method))
    axes[0, 0].set_ylabel("KV slots (tokens)")
    axes[1, 0].set(ylabel="running requests", xlabel="decode step")
    for one in axes.flat:
        one.set_ylim(bottom=0)
        light_grid(one)
        one.legend(**_SIDE)
    save(made, path)
    return True
