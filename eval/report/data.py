# SPDX-License-Identifier: Apache-2.0
"""Run folders as data frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.measures.accuracy import Key, keyed
from eval.measures.figures import figures
from eval.runs.folder import Result, cells, read_config

DENSE = "dense"


@dataclass(frozen=True)
class Data:
    """Everything that a report needs of some runs; ``results`` and ``lengths`` (output tokens of
    complete responses) are by run, task and method, over all seeds."""

    # A row a cell: where, title, Figures, kv_slots, legs, answered, graded, cut.
    cells: pd.DataFrame
    timeline: pd.DataFrame  # rows of cells' logs: run, task, method, seed, and Moment
    results: Mapping[tuple[str, str, str], Mapping[Key, Result]]
    lengths: Mapping[tuple[str, str, str], Mapping[Key, float]]
    configs: Mapping[str, Mapping[str, Any]]  # by run


def load(folders: Sequence[Path]) -> Data:
    """Read run folders. Raises RunError: one is no run folder, or has a broken file."""
    rows: list[dict[str, Any]] = []
    moments: list[dict[str, Any]] = []
    results: dict[tuple[str, str, str], dict[Key, Result]] = {}
    lengths: dict[tuple[str, str, str], dict[Key, float]] = {}
    configs = {_label(folder, folders): read_config(folder) for folder in folders}
    for run, folder in zip(configs, folders, strict=True):
        details = configs[run].get("method_details", {})
        for cell in cells(folder):
            responses, legs, timeline = cell.responses(), cell.legs(), cell.timeline()
            graded, answered = cell.results(), cell.answered()
            where = {"run": run, "task": cell.task, "method": cell.method, "seed": cell.seed}
            slots = [leg.kv_slots for leg in legs if leg.kv_slots]
            # A replay always ends by length: those that reproduce the record are not cut.
            whole = {row.problem_id for row in graded if row.correct and "_replay" in cell.task}
            cut = [n for n, r in answered.items() if r.finish_reason == "length" and n not in whole]
            title = details.get(cell.method, {}).get("title", cell.method)
            row = {**where, "title": title, **vars(figures(responses, legs, timeline))}
            row["kv_slots"] = min(slots, default=configs[run].get("kv_budget"))
            row["legs"] = len({one.leg for one in (*legs, *responses)})
            row |= dict(answered=len(answered), graded=len(graded), cut=len(cut))
            rows.append(row)
            moments += [{**where, **vars(moment)} for moment in timeline]
            key = (run, cell.task, cell.method)
            results.setdefault(key, {}).update(keyed({cell.seed: graded}))
            tokens = {(n, cell.seed): float(r.output_tokens) for n, r in answered.items()}
            lengths.setdefault(key, {}).update(tokens)
    frame = pd.DataFrame(rows)
    return Data(frame, pd.DataFrame(moments), results, lengths, configs)


def _label(folder: Path, folders: Sequence[Path]) -> str:
    """The folder's name, with its parent's where others have the same."""
    path = folder.resolve()
    alone = sum(other.resolve().name == path.name for other in folders) == 1
    return path.name if alone else f"{path.parent.name}/{path.name}"
