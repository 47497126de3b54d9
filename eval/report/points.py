# SPDX-License-Identifier: Apache-2.0
"""Figures of points and lines over a setting or over memory. Each returns the numbers it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from eval.report.bars import Data, group_numbers
from eval.report.data import DENSE, REASONCACHE, Group, Run
from eval.report.markdown import as_json
from eval.report.style import (
    GREY,
    LABEL_SIZE,
    colour,
    figure,
    light_grid,
    marker,
    marker_size,
    panels,
    save,
    text,
)
from eval.report.tables import PERCENTILES


def percentile(run: Run, path: Path) -> Data | None:
    """Accuracy and tokens/s against the percentile of the distance threshold."""
    found: dict[str, dict[float, Group]] = {}
    for (task, method), group in run.groups.items():
        p = percentile_of(method)
        if p is not None:
            points = found.setdefault(task, {})
            # p80 is ReasonCache by another name; one of the two is enough.
            if p not in points or method in PERCENTILES:
                points[p] = group
    found = {task: points for task, points in found.items() if len(points) > 1}
    if not found:
        return None
    made, axes = figure(4.2 * len(found) + 0.6, 5.6, 2, len(found))
    for column, (task, points) in enumerate(found.items()):
        top, bottom = axes[0, column], axes[1, column]
        order = sorted(points)
        dense = run.groups.get((task, DENSE))
        rows = [(p, points[p].accuracy) for p in order]
        _curve(top, [(p, e.value, e.low, e.high) for p, e in rows if e])
        speeds = [(p, points[p].speed("tokens_per_s")) for p in order]
        _curve(bottom, [(p, s.median, s.low, s.high) for p, s in speeds if s])
        if dense and dense.accuracy:
            _level(top, dense.accuracy.value)
        if dense and (base := dense.speed("tokens_per_s")):
            _level(bottom, base.median)
        for one in (top, bottom):
            one.set_xticks(order)
            one.set_xlim(min(order) - 8, max(order) + 12)
            light_grid(one)
        top.set_title(text(task), fontsize=10, loc="left")
        bottom.set_xlabel("percentile p of the distance threshold")
        top.set_ylabel("accuracy (95% interval)" if column == 0 else "")
        bottom.set_ylabel("output tokens/s" if column == 0 else "")
        bottom.set_ylim(bottom=0)
    save(made, path)
    return {
        task: {str(p): group_numbers(points[p]) for p in sorted(points)}
        for task, points in found.items()
    }


def saving(runs: Sequence[Run], path: Path) -> Data | None:
    """Accuracy against memory saved: every method of every run."""
    tasks = list(dict.fromkeys(task for run in runs for task in run.tasks))
    shown: Data = {}
    for run in runs:
        for (task, method), group in run.groups.items():
            spared = group.memory("saving")
            if group.accuracy and spared:
                numbers = {"saving": as_json(spared), "accuracy": as_json(group.accuracy)}
                shown.setdefault(task, {}).setdefault(run.label, {})[method] = numbers
    tasks = [task for task in tasks if task in shown]
    if not tasks:
        return None
    made, axes = panels(len(tasks), 5.4, 4.6)
    by_label = {run.label: run for run in runs}
    for one, task in zip(axes, tasks, strict=True):
        titles: dict[str, str] = {}
        for label, methods in shown[task].items():
            for method, numbers in methods.items():
                estimate, spared = numbers["accuracy"], numbers["saving"]
                x, y = 100 * spared["median"], estimate["value"]
                low, high = estimate["low"], estimate["high"]
                one.errorbar(
                    x,
                    y,
                    yerr=None if low is None else [[y - low], [high - y]],
                    xerr=[[x - 100 * spared["low"]], [100 * spared["high"] - x]],
                    color=colour(method),
                    linestyle="",
                    elinewidth=1,
                    **_look(method),
                )
                titles[method] = text(by_label[label].title(method))
        for method, title in titles.items():
            one.plot([], [], linestyle="", color=colour(method), label=title, **_look(method))
        one.set_title(text(task), fontsize=10, loc="left")
        one.set_xlabel("slots saved, % over decode steps")
        one.set_ylabel("accuracy (95% interval)")
        one.margins(0.06)
        light_grid(one, "both")
        one.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)
    return shown


def _look(method: str) -> Data:
    look = {"marker": marker(method), "markersize": marker_size(method)}
    return look | ({"markeredgewidth": 0.4} if marker(method).startswith("$") else {})


def percentile_of(method: str) -> float | None:
    """The percentile of a method that is ReasonCache but for it."""
    if method in PERCENTILES:
        return float(PERCENTILES[method])
    if method == REASONCACHE:
        return 80.0
    name, _, options = method.partition(":")
    key, _, value = options.partition("=")
    if name != "reasoncache" or key != "percentile":
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _curve(axes: Axes, rows: Sequence[tuple[float, float, float | None, float | None]]) -> None:
    if not rows:
        return
    x, y = [row[0] for row in rows], [row[1] for row in rows]
    axes.plot(x, y, "o-", color=colour("reasoncache"), markersize=5)
    for p, _, low, high in rows:
        if low is not None and high is not None:
            axes.plot([p, p], [low, high], color=colour("reasoncache"), linewidth=1.2)


def _level(axes: Axes, value: float) -> None:
    axes.axhline(value, color=GREY, linestyle="--", linewidth=1)
    axes.annotate(
        "dense", (1, value), (-2, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="right", fontsize=LABEL_SIZE, color=GREY,
    )  # fmt: skip
