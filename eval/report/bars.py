# SPDX-License-Identifier: Apache-2.0
"""Figures that compare methods: bars and boxes. Each returns the numbers it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from eval.measures.interval import Estimate, Spread
from eval.report.data import DENSE, Group, Run
from eval.report.markdown import as_json
from eval.report.style import GREY, LABEL_SIZE, colour, figure, panels, save, text
from eval.report.tables import STAGES, select

Data = dict[str, Any]


def throughput(run: Run, path: Path) -> Data | None:
    """Tokens/s by task and method; None if there is nothing to draw."""
    methods = _methods(run)
    data = {
        task: {m: s for m in methods if (s := _spread(run, task, m)) is not None}
        for task in run.tasks
    }
    data = {task: found for task, found in data.items() if found}
    if not data:
        return None
    # Horizontal, so that names and numbers have room.
    several = len(data) > 1
    bars = sum(map(len, data.values())) + 1.5 * len(data) * several
    made, axes = figure(8.5, 1.1 + 0.27 * bars)
    at, ticks = 0.0, []
    for task, found in data.items():
        dense = found.get(DENSE)
        if several:
            ticks.append((at, text(task)))
            at += 0.9
        for method, value in found.items():
            gain = "" if method == DENSE or not dense else f"  x{value.median / dense.median:.2f}"
            _bar(axes[0, 0], at, value, method, f"{value.median:.0f}{gain}")
            ticks.append((at, text(run.title(method))))
            at += 1
        at += 0.6
    axes[0, 0].set_yticks(*zip(*ticks, strict=True))
    axes[0, 0].tick_params(axis="y", length=0)
    headings = {text(task) for task in data} if several else set()
    for tick in axes[0, 0].get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() in headings else "normal")
    axes[0, 0].set_ylim(at - 0.6, -0.8)
    axes[0, 0].margins(x=0.14)
    axes[0, 0].set_xlabel("output tokens/s (median; line: range over seeds; x: times dense)")
    axes[0, 0].set_title(
        f"Throughput, {text(run.label if several else next(iter(data)))}", fontsize=11, loc="left"
    )
    save(made, path)
    return {task: {m: as_json(v) for m, v in found.items()} for task, found in data.items()}


def ablation(run: Run, path: Path) -> Data | None:
    """Accuracy, tokens/s and saving, stage by stage."""
    stages = [method for method in select(run, STAGES) if ":" not in method]
    if len(set(stages) - {DENSE}) < 2:
        return None
    tasks = [task for task in run.tasks if any((task, m) in run.groups for m in stages)]
    made, axes = figure(10, 0.9 + 0.38 * len(stages) * len(tasks), len(tasks), 3)
    for row, task in enumerate(tasks):
        groups = {m: run.groups[task, m] for m in stages if (task, m) in run.groups}
        for at, (method, group) in enumerate(groups.items()):
            if group.accuracy:
                _interval_bar(axes[row, 0], at, group.accuracy, method)
            if speed := group.speed("tokens_per_s"):
                _bar(axes[row, 1], at, speed, method, f"{speed.median:.0f}")
            if saving := group.memory("saving"):
                scaled = Spread.of([100 * v for v in (saving.low, saving.median, saving.high)])
                assert scaled is not None
                _bar(axes[row, 2], at, scaled, method, f"{scaled.median:.1f}%")
        for column, label in enumerate(
            ("accuracy (95% interval)", "output tokens/s", "slots saved, % over decode steps")
        ):
            one = axes[row, column]
            names = [text(run.title(m)) for m in groups] if column == 0 else []
            one.set_yticks(range(len(groups)) if names else [], names)
            one.set_ylim(len(groups) - 0.4, -0.6)
            one.margins(x=0.2)
            one.set_xlabel(label if row == len(tasks) - 1 else "", fontsize=9)
        axes[row, 0].set_title(text(task), fontsize=10, loc="left")
    save(made, path)
    return {task: _numbers(run, task, stages) for task in tasks}


def lengths(run: Run, path: Path) -> Data | None:
    """Response lengths by task and method: quartiles, 5th and 95th percentile."""
    methods = _methods(run)
    data = {
        task: {
            m: lengths
            for m in methods
            if (task, m) in run.groups and (lengths := run.groups[task, m].lengths)
        }
        for task in run.tasks
    }
    data = {task: found for task, found in data.items() if found}
    if not data:
        return None
    most = max(map(len, data.values()))
    made, axes = panels(len(data), 5.4, 1.2 + 0.36 * most)
    for one, (task, found) in zip(axes, data.items(), strict=True):
        boxes = [
            dict(zip(("whislo", "q1", "med", "q3", "whishi"), lengths.quartiles, strict=True))
            for lengths in found.values()
        ]
        drawn = one.bxp(
            boxes,
            orientation="horizontal",
            showfliers=False,
            widths=0.55,
            patch_artist=True,
            medianprops={"color": "black"},
            whiskerprops={"color": GREY},
            capprops={"color": GREY},
        )
        for box, method in zip(drawn["boxes"], found, strict=True):
            box.set(facecolor=colour(method), alpha=0.6, edgecolor=GREY)
        for at, lengths in enumerate(found.values(), 1):
            one.plot(lengths.mean.value, at, "k.", markersize=5)
        one.set_yticklabels([text(run.title(m)) for m in found])
        one.invert_yaxis()
        one.set_xlim(left=0)
        one.set_xlabel("output tokens (box: quartiles; whiskers: 5%, 95%; dot: mean)", fontsize=9)
        one.set_title(text(task), fontsize=10, loc="left")
    save(made, path)
    return {task: {m: as_json(v) for m, v in found.items()} for task, found in data.items()}


def _methods(run: Run) -> list[str]:
    return list(dict.fromkeys(m for m in run.methods if any(key[1] == m for key in run.groups)))


def _spread(run: Run, task: str, method: str) -> Spread | None:
    group = run.groups.get((task, method))
    return group.speed("tokens_per_s") if group else None


def _bar(axes: Axes, at: float, value: Spread, method: str, label: str) -> None:
    axes.barh(at, value.median, 0.72, color=colour(method), alpha=0.85)
    end = value.median
    if value.n > 1:
        axes.plot([value.low, value.high], [at, at], color="black", linewidth=1.3)
        end = max(end, value.high)
    _label(axes, at, end, label)


def _interval_bar(axes: Axes, at: float, value: Estimate, method: str) -> None:
    axes.barh(at, value.value, 0.72, color=colour(method), alpha=0.85)
    end = value.value
    if value.low is not None and value.high is not None:
        axes.plot([value.low, value.high], [at, at], color="black", linewidth=1.3)
        end = value.high
    _label(axes, at, end, f"{value.value:.3f}")


def _label(axes: Axes, at: float, end: float, label: str) -> None:
    axes.annotate(
        label, (end, at), (4, 0), textcoords="offset points", va="center", fontsize=LABEL_SIZE
    )


def _numbers(run: Run, task: str, methods: Sequence[str]) -> Data:
    return {m: group_numbers(run.groups[task, m]) for m in methods if (task, m) in run.groups}


def group_numbers(group: Group) -> Data:
    """What figures of methods show."""
    return {
        "accuracy": as_json(group.accuracy),
        "tokens_per_s": as_json(group.speed("tokens_per_s")),
        "saving": as_json(group.memory("saving")),
    }
