# SPDX-License-Identifier: Apache-2.0
"""The problems of a run: those that are measured, and others to warm up with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from eval.runs.folder import RunError
from eval.runs.options import RunOptions
from eval.tasks.task import Problem, Source, Task, TaskError
from eval.tiny_reasoner import CHECKPOINT

#: Added to a seed for problems that no cell measures.
_OTHER_SEED = 1_000_003


def model_path(options: RunOptions) -> str:
    """Folder or hub name of the model."""
    return str(CHECKPOINT) if options.embedded else options.model


def forced(problem: Problem) -> bool:
    """Whether the response is a record, as long as the problem's ``max_tokens``."""
    return bool(problem.extra.get("ignore_eos")) and problem.max_tokens is not None


class ProblemSet:
    """Loads each task once per seed.

    Args:
        options: of the run.
        tasks: by name, all of ``options.tasks``.
    """

    def __init__(self, options: RunOptions, tasks: Mapping[str, Task]) -> None:
        self.options = options
        self._tasks = tasks
        self._measured = {
            (name, seed): self._load(name, seed, options.limit)
            for name in options.tasks
            for seed in options.seeds
        }
        self._others: dict[tuple[str, int], list[Problem]] = {}

    def task(self, name: str) -> Task:
        return self._tasks[name]

    @property
    def all_measured(self) -> dict[tuple[str, int], list[Problem]]:
        """Of each task and seed."""
        return self._measured

    def measured(self, task: str, seed: int) -> list[Problem]:
        return self._measured[task, seed]

    def others(self, task: str, seed: int, count: int, generic: bool = True) -> list[Problem]:
        """Up to ``count`` problems that no cell of the task measures.

        With ``generic``, plain sums fill up what the task does not have.
        """
        key = (task, seed)
        if key not in self._others:
            measured = [p for (name, _), row in self._measured.items() if name == task for p in row]
            asked = {p.prompt for p in measured} | {p.id for p in measured}
            try:
                found = self._load(task, seed + _OTHER_SEED, None)
            except (TaskError, RunError):
                found = []
            self._others[key] = [p for p in found if not {p.prompt, p.id} & asked]
        spare = self._others[key][:count]
        if generic:
            spare = spare + [_sum(number) for number in range(count - len(spare))]
        return spare

    def _load(self, name: str, seed: int, limit: int | None) -> list[Problem]:
        source = Source(
            path=Path(self.options.data[name]) if name in self.options.data else None,
            seed=seed,
            limit=limit,
            model=model_path(self.options),
            allow_code=self.options.allow_code_execution,
        )
        problems = self._tasks[name].load(source)
        if not problems:
            raise RunError(f"--tasks: {name} has no problems")
        ids = {problem.id for problem in problems}
        if len(ids) < len(problems):
            raise RunError(f"--tasks: {name}: {len(problems) - len(ids)} problems share an id")
        return problems


def _sum(number: int) -> Problem:
    a, b = 37 + 11 * number, 58 + 7 * number
    return Problem(f"sum-{number}", f"What is {a} + {b}? Think step by step.", str(a + b))
