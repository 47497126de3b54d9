# SPDX-License-Identifier: Apache-2.0
"""Finds the settings of ``tuned``: stock SGLang as an operator runs it who is short of memory and has swept two
settings on the very workload that is measured."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from eval.methods import CANDIDATES, Method, find_method
from eval.runs.folder import Cell, RunError, write_json
from eval.runs.options import RunOptions


def tuned(
    method: Method, options: RunOptions, folder: Path, measure: Callable[[RunOptions, Path], bool]
) -> Method:
    """``method`` with the best of ``CANDIDATES``, by output tokens per second over the tasks of ``options``
    with their first seed. Finds it once, and keeps it in ``tuned.json`` in the run's folder.

    Args:
        measure: Measures a run in a folder.

    Raises:
        RunError: A candidate could not be measured.
    """
    kept = folder / "tuned.json"
    if not kept.exists():
        trial = dataclasses.replace(
            options, methods=CANDIDATES, seeds=options.seeds[:1], keep_servers=1
        )
        measure(trial, folder / "tuning")
        speeds = {spec: _tokens_per_second(trial, folder / "tuning", spec) for spec in CANDIDATES}
        write_json(
            kept, {"best": max(speeds, key=lambda spec: speeds[spec]), "tokens_per_s": speeds}
        )
    try:
        best = find_method(json.loads(kept.read_text())["best"])
    except (ValueError, KeyError) as error:
        raise RunError(f"{kept}: {error}") from error
    return dataclasses.replace(method, stock={**best.stock, **method.stock})


def _tokens_per_second(options: RunOptions, folder: Path, spec: str) -> float:
    cells = [Cell(folder, task, spec, options.seeds[0]).whole().served() for task in options.tasks]
    return sum(served.output_tokens for served in cells) / sum(served.seconds for served in cells)
