# SPDX-License-Identifier: Apache-2.0
"""Figures over time and over the KV budget. Each returns the numbers it shows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from eval.measures.interval import Spread
from eval.report.bars import Data
from eval.report.data import DENSE, RANDOM, REASONCACHE, Group, Run
from eval.report.markdown import Entry, Table, as_json, number, plain, spread, words
from eval.report.style import (
    GREY,
    LABEL_SIZE,
    colour,
    figure,
    light_grid,
    marker,
    marker_size,
    save,
    text,
)
from eval.report.tables import select

_OVER_TIME = (DENSE, REASONCACHE, RANDOM)


def memory(run: Run, task: str, path: Path) -> Data | None:
    """Slots used and saved, and running requests, step by step; the first seed of each method."""
    curves = {}
    for method in select(run, _OVER_TIME):
        group = run.groups.get((task, method))
        if group and group.cells and (curve := group.cells[min(group.cells)].curve):
            curves[method] = curve
    if not curves:
        return None
    interval = run.config.get("decode_log_interval")
    every = interval if isinstance(interval, int) and interval > 0 else 1
    made, axes = figure(8.5, 5.6, 2, 1)
    slots, running = axes[0, 0], axes[1, 0]
    for method, curve in curves.items():
        x, name = [every * step for step in curve.step], text(run.title(method))
        slots.plot(x, curve.used, color=colour(method), linewidth=1.4, label=f"{name}: in use")
        if any(curve.saved):
            slots.plot(
                x, curve.saved, color=colour(method), linewidth=1.2, linestyle=":",
                label=f"{name}: saved",
            )  # fmt: skip
        running.plot(x, curve.running, color=colour(method), linewidth=1.4, label=name)
    if run.kv_slots:
        slots.axhline(run.kv_slots, color=GREY, linestyle="--", linewidth=1, label="KV slots")
    slots.set_title(f"{text(task)}, {text(run.label)}", fontsize=11, loc="left")
    slots.set_ylabel("KV slots (tokens)")
    running.set_ylabel("running requests")
    running.set_xlabel("decode step" if interval else "decode step that was logged")
    for one in (slots, running):
        one.set_ylim(bottom=0)
        one.set_xlim(left=0)
        light_grid(one)
        one.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    save(made, path)
    return {method: as_json(curve) for method, curve in curves.items()}


def budgets(runs: Sequence[Run]) -> dict[tuple[str, str], dict[int, list[Run]]]:
    """Runs by (model, task) and the KV slots they really had, where several budgets were asked for."""
    found: dict[tuple[str, str], dict[int, list[Run]]] = {}
    for run in runs:
        if run.kv_budget is not None and run.kv_slots is not None:
            for task in run.tasks:
                found.setdefault((run.model, task), {}).setdefault(run.kv_slots, []).append(run)
    return {key: by_budget for key, by_budget in found.items() if len(by_budget) > 1}


def budget(task: str, by_budget: dict[int, list[Run]], path: Path) -> Data | None:
    """Throughput against KV budget, one line a method, and its ratio to dense."""
    first = next(iter(by_budget.values()))[0]
    methods = list(dict.fromkeys(m for runs in by_budget.values() for r in runs for m in r.methods))
    speeds = {m: _line(by_budget, task, m, _tokens_per_s) for m in methods}
    speeds = {method: line for method, line in speeds.items() if line}
    if not speeds:
        return None
    ratios = {m: _line(by_budget, task, m, _speedup) for m in methods if m != DENSE}
    savings = {m: _line(by_budget, task, m, _saving) for m in ratios}
    made, axes = figure(8.5, 6.4, 2, 1)
    for row, lines in ((0, speeds), (1, ratios)):
        one = axes[row, 0]
        for method, line in lines.items():
            if not line:
                continue
            x = sorted(line)
            one.errorbar(
                x,
                [line[b].median for b in x],
                yerr=[
                    [line[b].median - line[b].low for b in x],
                    [line[b].high - line[b].median for b in x],
                ],
                marker=marker(method), color=colour(method), elinewidth=1,
                markersize=marker_size(method),
                label=text(first.title(method)),
            )  # fmt: skip
            if row and method in (REASONCACHE, next(iter(ratios))):
                for b in x:
                    if b in savings[method]:
                        one.annotate(
                            f"{savings[method][b].median:.0%}", (b, line[b].high), (0, 6),
                            textcoords="offset points", ha="center", fontsize=LABEL_SIZE,
                            color=colour(method),
                        )  # fmt: skip
        one.set_xscale("log", base=2)
        one.set_xticks(
            sorted(by_budget),
            [f"{b:,}" for b in sorted(by_budget)],
            rotation=30 * (len(by_budget) > 6),
        )
        one.minorticks_off()
        one.margins(y=0.15)
        light_grid(one)
        one.legend(fontsize=LABEL_SIZE, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("output tokens/s")
    title = text(task) + (f", {text(first.model)}" if first.model != task else "")
    axes[0, 0].set_title(title, fontsize=11, loc="left")
    axes[1, 0].set_title(
        "over dense's; at the points: slots saved over decode steps", fontsize=9.5, loc="left"
    )
    axes[1, 0].axhline(1, color=GREY, linestyle="--", linewidth=1)
    axes[1, 0].set_ylabel("ratio of tokens/s")
    axes[1, 0].set_xlabel("KV slots that the servers had (one a token)")
    save(made, path)
    return {
        what: {m: {str(b): as_json(line[b]) for b in sorted(line)} for m, line in lines.items()}
        for what, lines in (("tokens_per_s", speeds), ("ratio", ratios), ("saving", savings))
    }


def budget_table(task: str, model: str, by_budget: dict[int, list[Run]]) -> Table:
    """The figure's numbers."""
    rows = []
    for slots in sorted(by_budget):
        runs = by_budget[slots]
        for method in dict.fromkeys(m for run in runs for m in run.methods):
            at = f"{task}, {method}, {slots} slots"
            groups = [g for run in runs if (g := run.groups.get((task, method)))]
            rows.append(
                [
                    Entry(f"{slots:,}", slots),
                    words(runs[0].title(method)),
                    spread(
                        _over(runs, task, method, _tokens_per_s),
                        f"{'resumed' if any(g.resumed for g in groups) else 'no leg record'} ({at})",
                    ),
                    Entry("1", 1)
                    if method == DENSE
                    else spread(_over(runs, task, method, _speedup), f"no pair ({at})", "{:.2f}"),
                    spread(_over(runs, task, method, _saving), f"no saving ratio ({at})", "{:.1%}"),
                    spread(
                        Spread.of([_median(g.speed("mean_running")) for g in groups]),
                        f"no timeline ({at})",
                    ),
                    spread(
                        Spread.of([_median(g.memory("retractions")) for g in groups]),
                        f"no leg record ({at})",
                        "{:.0f}",
                    ),
                    number(
                        _mean([g.accuracy.value for g in groups if g.accuracy]),
                        f"no grades ({at})",
                        "{:.3f}",
                    ),
                ]
            )
    columns = (
        "KV slots", "method", "tokens/s", "over dense", "saved, decode steps", "running",
        "retractions", "accuracy",
    )  # fmt: skip
    title = f"KV budget: {plain(task)}, {plain(model)}"
    return Table(
        f"budget_{task}_{model}", title, columns, rows, ["Median over runs and seeds, and range."]
    )


def _tokens_per_s(group: Group, _dense: Group | None) -> list[float | None]:
    return [cell.speed.tokens_per_s for cell in group.cells.values()]


def _saving(group: Group, _dense: Group | None) -> list[float | None]:
    return [cell.memory.saving for cell in group.cells.values()]


def _speedup(group: Group, dense: Group | None) -> list[float | None]:
    return [] if dense is None else list(group.speedups(dense))


def _over(runs: Sequence[Run], task: str, method: str, what: object) -> Spread | None:
    """A figure of all seeds of all runs."""
    values: list[float | None] = []
    for run in runs:
        if group := run.groups.get((task, method)):
            values += what(group, run.groups.get((task, DENSE)))  # type: ignore[operator]
    return Spread.of(values)


def _line(
    by_budget: dict[int, list[Run]], task: str, method: str, what: object
) -> dict[int, Spread]:
    return {b: s for b, runs in by_budget.items() if (s := _over(runs, task, method, what))}


def _median(value: Spread | None) -> float | None:
    return value.median if value else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
