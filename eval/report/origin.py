# SPDX-License-Identifier: Apache-2.0
"""Where numbers come from: run folder, commit, machine and date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.report.data import Run
from eval.report.markdown import code, plain
from eval.report.shortfalls import shortfalls


def origin(run: Run) -> str:
    """Folder, commit, machine and date of a run."""
    return f"{code(run.label)} ({plain(', '.join((*_place(run), _date(run))))})"


def source(runs: Sequence[Run]) -> str:
    """The same of all runs, those of one commit and machine together."""
    places: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        places.setdefault(_place(run), []).append(run)
    parts = []
    for place, found in places.items():
        dates = sorted({_date(run) for run in found})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        labels = ", ".join(code(run.label) for run in found)
        parts.append(f"{labels} ({plain(', '.join((*place, when)))})")
    return f"Source: {'; '.join(parts)}."


def _place(run: Run) -> tuple[str, ...]:
    versions = run.config.get("versions")
    commit = run.config.get("commit")
    if not commit and isinstance(versions, dict):
        commit = versions.get("commit")
    text = str(commit)
    # The mark of files that differ from the commit stays.
    short = text[:12] + ("+" if text.endswith("+") else "") if commit else "-"
    place = (f"commit {short}", _machine(run.config.get("machine")))
    return (*place, "incomplete") if shortfalls(run) else place


def _date(run: Run) -> str:
    return str(run.config.get("date") or "no date")


def _machine(machine: Any) -> str:
    if not isinstance(machine, dict):
        return str(machine) if machine else "machine -"
    gpus = machine.get("gpus")
    if isinstance(gpus, list) and gpus:
        return f"{len(gpus)} GPU {gpus[0]}"
    return f"{machine.get('cpu', 'CPU -')}, {machine.get('cores', '-')} cores"
