# SPDX-License-Identifier: Apache-2.0
"""The report: which tables and pictures, in which order, and what is said about them."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.report import against_dense, curves, points, tables
from eval.report.data import Run
from eval.report.markdown import code, plain
from eval.report.origin import origin, source
from eval.report.page import Options, Page, slug
from eval.report.run_figures import add_figures
from eval.report.shortfalls import shortfalls
from eval.runs.folder import write_whole

#: With more runs, figures of single runs are drawn for the fullest of each model only.
_MOST_SINGLE = 3
_MOST_LINES = 20


def write(runs: Sequence[Run], options: Options) -> Path:
    """REPORT.md, its pictures and summary.json; returns the report's path.

    Raises:
        OSError: something cannot be written.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    out = Page(options)
    origins = [origin(run) for run in runs]
    out.source = source(runs)
    out.lines += ["# Evaluation", ""]
    _runs(out, runs)
    _paper_tables(out, runs)
    out.heading("Against dense")
    out.table(against_dense.quality(runs), "No method has run beside dense.")
    out.table(against_dense.speed(runs))
    out.table(against_dense.classes(runs))
    _comparing_figures(out, runs)
    single = _single(runs)
    prefixes = [slug(run.label) for run in single]
    for number, (run, prefix) in enumerate(zip(single, prefixes, strict=True)):
        out.options.say(f"figures of {run.label}")
        if prefixes.count(prefix) > 1:
            prefix += f"-{number}"
        add_figures(out, run, f"{prefix}_" if len(single) > 1 else "")
    _faults(out, runs)
    summary: dict[str, Any] = {
        "runs": [
            {
                "label": run.label,
                "folder": str(run.folder),
                "model": run.model,
                "kv_budget": run.kv_budget,
                "kv_slots": run.kv_slots,
                "origin": origin,
                "incomplete": shortfalls(run),
            }
            for run, origin in zip(runs, origins, strict=True)
        ],
        "errors": dict(_errors(runs).most_common()),
        "tables": out.tables,
        "figures": out.figures,
    }
    write_whole(options.out / "summary.json", json.dumps(summary, indent=1, allow_nan=False) + "\n")
    path = options.out / "REPORT.md"
    write_whole(path, "\n".join(out.lines).rstrip() + "\n")
    return path


def _runs(out: Page, runs: Sequence[Run]) -> None:
    for run in runs:
        lacking = shortfalls(run)
        label = "**incomplete** " if lacking else ""
        budget = f", {run.kv_slots:,} KV slots" if run.kv_slots else ""
        seeds = ", ".join(map(str, run.config["seeds"]))
        out.lines.append(
            f"- {label}{origin(run)}: {plain(run.model)}{budget}, seeds {plain(seeds)}"
        )
        command = run.config.get("command_line") or run.config.get("command")
        if isinstance(command, list):
            command = " ".join(map(str, command))
        if command:
            out.lines.append(f"  - {code(str(command), 2000)}")
        for fault in lacking[:_MOST_LINES]:
            out.lines.append(f"  - incomplete: {plain(fault)}")
        if len(lacking) > _MOST_LINES:
            out.lines.append(f"  - and {len(lacking) - _MOST_LINES} more")
    out.lines.append("")
    out.say(
        "Tables I to IV have the shape of the ReasonCache paper's (arXiv 2507.21433). Its Figure 2 is "
        "taken to be the redundancy of responses; which numbers (3, 5, 6, 7) the block distances, "
        "throughput, percentile and ablation figures have there could not be checked, so figures "
        "here are named by what they show. The papers ran 32B and 14B models on A800 GPUs: compare "
        "shapes, not numbers."
    )


def _paper_tables(out: Page, runs: Sequence[Run]) -> None:
    out.heading("The papers' tables")
    none = "no run has its methods."
    out.table(
        tables.wide("table_1", "Table I: accuracy, throughput, memory saved", runs, tables.MAIN),
        f"Table I: {none}",
    )
    out.table(tables.all_methods(runs), f"Table II: {none}")
    out.table(
        tables.wide(
            "table_3",
            "Table III: the filter stage by stage",
            runs,
            tables.STAGES,
            note="Cosine: lexical similarity alone; + structure: formal content must agree; "
            "ReasonCache: + distance of K and V.",
        )
        if _has(runs, {"cosine", "cosine-structure"}, False)
        else None,
        "Table III (ablation): not run: cosine, cosine-structure.",
    )
    rest = set(tables.VARIANTS) - set(tables.MAIN)
    out.table(
        tables.wide(
            "table_4",
            "Table IV: percentiles, encoders, distances, thresholds",
            runs,
            tables.VARIANTS,
            variants=True,
        )
        if _has(runs, rest, True)
        else None,
        f"Table IV (variants): not run: {', '.join(sorted(rest))}.",
    )


def _has(runs: Sequence[Run], methods: set[str], variants: bool) -> bool:
    return any(
        method in methods or (variants and ":" in method and not method.startswith(tables.RANDOM))
        for run in runs
        for _, method in run.groups
    )


def _comparing_figures(out: Page, runs: Sequence[Run]) -> None:
    out.heading("Figures over all runs")
    out.figure(
        "accuracy_saving",
        "Accuracy against memory saved, every method",
        points.saving(runs, out.path("accuracy_saving")),
        "no method has both grades and a saving ratio",
    )
    sweeps = curves.budgets(runs)
    for (model, task), by_budget in sweeps.items():
        name = (
            "budget_" + slug(task) + ("" if len({m for m, _ in sweeps}) == 1 else "_" + slug(model))
        )
        out.figure(
            name,
            f"Throughput against KV budget, {plain(task)}; at the points, slots saved",
            curves.budget(task, by_budget, out.path(name)),
            "no leg records",
        )
        out.table(curves.budget_table(task, model, by_budget))
    if not sweeps:
        out.say("*Throughput against KV budget*: not drawn: no two runs differ in `kv_budget`.")


def _faults(out: Page, runs: Sequence[Run]) -> None:
    out.heading("Requests and faults")
    out.table(against_dense.requests(runs))
    errors = _errors(runs)
    if errors:
        out.say(f"Failed attempts: {errors.total()}. Most frequent messages:")
        out.lines += [f"- {count} times: {code(text)}" for text, count in errors.most_common(5)]
        out.lines.append("")
    else:
        out.say("No request failed.")


def _errors(runs: Sequence[Run]) -> collections.Counter[str]:
    """Messages of failed attempts with their numbers."""
    found: collections.Counter[str] = collections.Counter()
    for run in runs:
        for group in run.groups.values():
            found.update(group.errors)
    return found


def _single(runs: Sequence[Run]) -> list[Run]:
    """Runs that get figures of their own."""
    if len(runs) <= _MOST_SINGLE:
        return list(runs)
    fullest: dict[str, Run] = {}
    for run in runs:
        if run.model not in fullest or len(run.groups) > len(fullest[run.model].groups):
            fullest[run.model] = run
    return list(fullest.values())
