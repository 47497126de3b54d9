# SPDX-License-Identifier: Apache-2.0
"""Dense responses with their prompts, which records do not hold."""

from __future__ import annotations

import itertools
from pathlib import Path

from eval.report.data import Run
from eval.runs.options import EMBEDDED
from eval.tasks.registry import find_task
from eval.tasks.task import Source, TaskError


def samples(run: Run, task: str, most: int) -> list[tuple[str, str]]:
    """User message and text of the first ``most`` dense responses.

    The message is "" where the task's problems are neither generated nor in a local
    file: a report asks no hub.
    """
    rows = list(itertools.islice(run.dense_texts(task), most))
    prompts = {seed: _prompts(run, task, seed) for seed in {seed for _, seed, _ in rows}}
    return [(prompts[seed].get(problem, ""), text) for problem, seed, text in rows]


def _prompts(run: Run, task: str, seed: int) -> dict[str, str]:
    data = run.config.get("data")
    entry = data.get(task) if isinstance(data, dict) else None
    path = entry.get("path") if isinstance(entry, dict) else entry
    if not isinstance(path, str) and task != EMBEDDED:
        return {}
    source = Source(
        path=Path(path) if isinstance(path, str) else None,
        seed=seed,
        limit=run.config.get("limit"),
        model=str(run.model_folder or ""),
    )
    try:
        return {problem.id: problem.prompt for problem in find_task(task).load(source)}
    except TaskError:
        # The file has gone since; the response alone does as well.
        return {}
