# SPDX-License-Identifier: Apache-2.0
"""Run folders in memory: what the measures need, without the texts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eval.measures import accuracy, length
from eval.measures.accuracy import Key
from eval.measures.interval import Estimate, Spread
from eval.measures.memory import Curve, Memory, memory, over_time
from eval.measures.speed import Speed, speed
from eval.methods import MethodError, find_method
from eval.replay.task import ReplayTask
from eval.runs.folder import Cell, cells, read_config
from eval.runs.options import EMBEDDED
from eval.runs.records import Response, Result
from eval.tasks.registry import TASKS
from eval.tiny_reasoner import CHECKPOINT
from sglang_reasoncache.filter.settings import FilterConfig

DENSE, REASONCACHE, RANDOM = "dense", "reasoncache", "random"


@dataclass(frozen=True)
class Measured:
    """One cell; texts are gone."""

    speed: Speed
    memory: Memory
    curve: Curve | None


@dataclass(frozen=True)
class Group:
    """A task under a method, all seeds.

    Attributes:
        failed: attempts that ended in an error, repeated or not.
        unanswered: problems (of all seeds) without a complete response.
        errors: the messages of failed attempts, shortened, with their numbers.
        legs: server sessions, over all seeds.
        command: the last server's, [] if it was only given as URL.
        kv_slots: KV slots that the servers had, fewest first; empty if none told.
        cut_prompts: prompts that servers cut, over all legs that know.
    """

    task: str
    method: str
    cells: dict[int, Measured]
    results: dict[Key, Result]
    responses: dict[Key, Response]
    failed: int
    unanswered: int
    errors: collections.Counter[str]
    legs: int
    command: list[str]
    kv_slots: tuple[int, ...] = ()
    cut_prompts: int = 0

    @cached_property
    def accuracy(self) -> Estimate | None:
        return accuracy.accuracy(self.results)

    @cached_property
    def lengths(self) -> length.Lengths | None:
        return length.lengths(self.responses)

    @cached_property
    def cut(self) -> int:
        """Responses that ended by length; of a replay, which always does, those cut short of it."""
        replayed = isinstance(TASKS.get(self.task), ReplayTask)
        return length.cut(self.responses, self.results if replayed else None)

    @property
    def resumed(self) -> bool:
        """Whether a seed has no throughput because it was stopped or resumed."""
        return any(cell.speed.resumed for cell in self.cells.values())

    def no_speed(self) -> str:
        """Why there may be no throughput."""
        return f"{'resumed' if self.resumed else 'no leg record'} ({self.task}, {self.method})"

    def speed(self, name: str) -> Spread | None:
        """A field of :class:`Speed` over seeds."""
        return Spread.of([getattr(cell.speed, name) for cell in self.cells.values()])

    def memory(self, name: str) -> Spread | None:
        """A field of :class:`Memory` over seeds."""
        return Spread.of([getattr(cell.memory, name) for cell in self.cells.values()])

    def speedups(self, dense: Group) -> list[float]:
        """Tokens/s over dense's, for each seed that both have."""
        return [
            one / other
            for seed, cell in self.cells.items()
            if seed in dense.cells
            and (one := cell.speed.tokens_per_s)
            and (other := dense.cells[seed].speed.tokens_per_s)
        ]


@dataclass(frozen=True)
class Run:
    """A run folder.

    Attributes:
        label: its name in tables, unique in a report.
        groups: by task and method, those that have been begun.
    """

    label: str
    folder: Path
    config: dict[str, Any]
    groups: dict[tuple[str, str], Group]

    @property
    def tasks(self) -> list[str]:
        return [str(task) for task in self.config["tasks"]]

    @property
    def methods(self) -> list[str]:
        return [str(method) for method in self.config["methods"]]

    @property
    def model(self) -> str:
        """The model's name, without the folders it lies in."""
        model = self.config.get("model")
        if not isinstance(model, str) or not model:
            return "-"
        return Path(model).name if Path(model).is_dir() else model

    @property
    def model_folder(self) -> Path | None:
        """Where the model lies, None for one of the hub."""
        if self.config.get("model") == EMBEDDED:
            return CHECKPOINT
        model = self.config.get("model")
        return Path(model) if isinstance(model, str) and Path(model).is_dir() else None

    @property
    def kv_budget(self) -> int | None:
        """KV slots that the servers were asked to have, None if SGLang chose."""
        budget = self.config.get("kv_budget")
        return budget if isinstance(budget, int) and not isinstance(budget, bool) else None

    @property
    def kv_slots(self) -> int | None:
        """KV slots that the servers really had, at least; the budget where none told."""
        told = [group.kv_slots[0] for group in self.groups.values() if group.kv_slots]
        return min(told, default=self.kv_budget)

    @property
    def block(self) -> int:
        """Tokens a shared block, as the sharing servers were told."""
        for group in self.groups.values():
            if "--reasoncache-block" in group.command[:-1]:
                value = group.command[group.command.index("--reasoncache-block") + 1]
                if value.isdecimal() and 0 < int(value) <= 1024:
                    return int(value)
        return FilterConfig().block

    def title(self, method: str) -> str:
        """A method's name for people."""
        details = self.config.get("method_details")
        entry = details.get(method) if isinstance(details, dict) else None
        if isinstance(entry, dict) and isinstance(entry.get("title"), str):
            return str(entry["title"])
        try:
            return find_method(method).title
        except MethodError:
            return method

    def dense_texts(self, task: str) -> Iterator[tuple[str, int, str]]:
        """Problem, seed and text of complete dense responses, read anew, one seed in memory."""
        for cell in cells(self.folder):
            if (cell.task, cell.method) == (task, DENSE):
                for row in cell.answered().values():
                    # Half surrogates pass through JSON and nothing else.
                    text = row.text.encode("utf-8", errors="replace").decode("utf-8")
                    yield row.problem_id, cell.seed, text


def load(folders: Sequence[Path]) -> list[Run]:
    """Read run folders; those of a model together, by KV budget.

    Raises:
        RunError: one is no run folder, or has a broken file.
    """
    names = collections.Counter(folder.resolve().name for folder in folders)
    runs = []
    for folder in folders:
        path = folder.resolve()
        label = path.name if names[path.name] == 1 else f"{path.parent.name}/{path.name}"
        runs.append(_load(folder, label))
    models = list(dict.fromkeys(run.model for run in runs))
    return sorted(runs, key=lambda run: (models.index(run.model), run.kv_slots or 0))


def _load(folder: Path, label: str) -> Run:
    config = read_config(folder)
    by_group: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells(folder):
        by_group.setdefault((cell.task, cell.method), []).append(cell)
    groups = {key: _group(*key, found) for key, found in by_group.items()}
    return Run(label, folder, config, groups)


def _group(task: str, method: str, found: Sequence[Cell]) -> Group:
    measured: dict[int, Measured] = {}
    results: dict[int, list[Result]] = {}
    responses: dict[int, list[Response]] = {}
    errors: collections.Counter[str] = collections.Counter()
    unanswered = legs_seen = cut_prompts = 0
    slots: set[int] = set()
    command: list[str] = []
    for cell in found:
        # Only here a cell's texts are in memory.
        rows = [dataclasses.replace(row, text="") for row in cell.responses()]
        legs, timeline = cell.legs(), cell.timeline()
        command = next((leg.command for leg in reversed(legs) if leg.command), command)
        slots |= {leg.kv_slots for leg in legs if leg.kv_slots}
        cut_prompts += sum(leg.cut_prompts or 0 for leg in legs)
        responses[cell.seed], results[cell.seed] = rows, cell.results()
        errors.update(row.error[:200] for row in rows if row.error is not None)
        answered = {row.problem_id for row in rows if row.error is None}
        unanswered += len({row.problem_id for row in rows} - answered)
        legs_seen += max([leg.leg + 1 for leg in legs] + [row.leg + 1 for row in rows], default=0)
        # A repeat of an answered problem counts once.
        once = [row for row in rows if row.error is not None]
        once += {row.problem_id: row for row in rows if row.error is None}.values()
        measured[cell.seed] = Measured(
            speed(once, legs, timeline), memory(legs, timeline), over_time(timeline)
        )
    return Group(
        task,
        method,
        measured,
        accuracy.keyed(results),
        length.keyed(responses),
        errors.total(),
        unanswered,
        errors,
        legs_seen,
        command,
        tuple(sorted(slots)),
        cut_prompts,
    )
