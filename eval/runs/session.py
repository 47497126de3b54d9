# SPDX-License-Identifier: Apache-2.0
"""Works on a run: measures and grades every cell that is not complete, in the order of the plan."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from eval.measures.figures import of_cells
from eval.methods import Method, with_ratio
from eval.runs.cells import faults, measure, warm_up, warnings
from eval.runs.folder import Cell, Leg, Result, RunError, write_config
from eval.runs.plan import Plan, Step, order
from eval.runs.servers import Server, Servers
from eval.serving import ServerError
from eval.tasks.harness import EvalTask, Problem
from eval.tasks.sandbox import SandboxError

#: Relative difference between two savings that counts as equal.
TOLERANCE = 0.05
PILOT_PROBLEMS = 24
_MOST_PILOTS = 3
# The embedded model saved 31% at a ratio of 0.4: the first step of a response has no earlier one,
# and an unfinished last step is never compared.
_FIRST_FACTOR = 1.3
_LEAST_RATIO = 0.01


class NothingToMatch(RunError):
    """A method saved nothing, so no random sharing saves as much."""


class Display(Progress):
    """What an operator sees: one bar a cell at the bottom, lines above. A context manager."""

    def __init__(self) -> None:
        title = TextColumn("{task.description}", markup=False)
        columns = (title, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Drawing shares the processors with a server without a GPU.
        super().__init__(*columns, refresh_per_second=2)

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
        """A bar, as what moves it by one."""
        number = self.add_task(title, total=total, completed=done)
        try:
            yield lambda: self.advance(number)
        finally:
            self.remove_task(number)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)


@dataclass(frozen=True)
class Session:
    """What is left of a run, whose folder the caller has locked; random ratios that are found are
    added to ``config`` and its file. ``methods`` are in the order of the options'."""

    run: Path
    config: dict[str, Any]
    plan: Plan
    methods: Sequence[Method]
    servers: Servers
    display: Display

    @property
    def urls(self) -> dict[str, str]:
        """Given servers by method."""
        named = zip(self.methods, self.plan.options.methods, strict=True)
        given = self.plan.options.urls
        return {method.name: given[spec] for method, spec in named if spec in given}

    def work(self) -> bool:
        """Measure and grade every cell; True when no request failed and all could be graded."""
        options, whole = self.plan.options, True
        for step in order(options.tasks, self.methods, options.seeds):
            try:
                whole &= self._cell(step)
                continue
            except SandboxError as error:
                self.display.say(f"{step.title}: not graded: {error}", "red")
            except (ServerError, RunError) as error:
                # One cell that cannot be measured must not cost the others their night.
                self.display.say(f"{step.title}: {error}", "red")
                if not isinstance(error, NothingToMatch):
                    self.servers.close()
            whole = False
        return whole

    def _cell(self, step: Step) -> bool:
        cell = Cell(self.run, step.task, step.method.name, step.seed)
        cell.mend()
        task = self.plan.tasks[step.task, step.seed]
        legs: list[Leg] = []

        def ask(problems: Sequence[Problem]) -> None:
            answered = cell.answered()
            todo = [problem for problem in problems if problem.id not in answered]
            if todo:
                legs.append(self._measure(step, cell, todo, len(answered)))

        results = grade(cell, task, bool(self.config["opens_thinking"]), ask)
        leg = legs[0] if legs else None
        self.display.say(summary(step.title, results, leg))
        failed = len(task.problems) - len(cell.answered())
        if failed:
            self.display.say(f"{step.title}: {failed} requests failed; run again to retry", "red")
        if leg is not None:
            limits = {problem.id: self._limit(problem, step.seed) for problem in task.problems}
            for fault in faults(leg, cell.responses(), limits):
                self.display.say(f"{step.title}: {fault}", "red")
        return not failed

    def _measure(self, step: Step, cell: Cell, todo: Sequence[Problem], answered: int) -> Leg:
        plan, options = self.plan, self.plan.options
        server = self._server(step)
        slots = server.kv_slots()
        if slots is not None:
            plan.refuse_what_cannot_fit(step.task, slots)
            wanted = options.kv_budget if server.command else None
            longest = max(self._limit(problem, step.seed) for problem in todo)
            for warning in warnings(slots, wanted, longest):
                self.display.say(f"{step.title}: {warning}", "yellow")
        spare = plan.others(step.task, step.seed, options.warm_up)
        with self.display.bar(f"{step.title}: warm-up", len(spare)) as advance:
            requests = [plan.request(problem, step.seed, True) for problem in spare]
            warm_up(server, requests, options, advance)
        with self.display.bar(step.title, answered + len(todo), answered) as advance:
            requests = [plan.request(problem, step.seed) for problem in todo]
            return measure(cell, requests, server, options, advance)

    def _limit(self, problem: Problem, seed: int) -> int:
        return int(self.plan.request(problem, seed).body.get("max_tokens") or 0)

    def _server(self, step: Step) -> Server:
        method = step.method
        if method.name in self.urls:
            return Server(url=self.urls[method.name])
        if method.match:
            method = with_ratio(method, self._ratio(step))
        return self._start(step, method, step.title)

    def _start(self, step: Step, method: Method, title: str) -> Server:
        flags, say = self.plan.server_flags(step, method), self.display.say
        return self.servers.get(method.name, flags, lambda: say(f"{title}: starting a server"))

    def _ratio(self, step: Step) -> float:
        """The ratio of a random method for a task, found once and kept in ``config.json``."""
        ratios = self.config["random_ratios"]
        key = f"{step.task}/{step.method.name}"
        if key not in ratios:
            target = self._target(step)
            found = match(target, lambda ratio: self._pilot(step, with_ratio(step.method, ratio)))
            ratios[key] = found
            write_config(self.run, self.config)
            last = found["pilots"][-1][1]
            if abs(last - target) > TOLERANCE * target:
                missed = f"the last pilot saved {last:.1%}, not {target:.1%}"
                at = f"measuring at ratio {found['ratio']}"
                self.display.say(f"{key}: {missed}; {at}", "yellow")
        return float(ratios[key]["ratio"])

    def _target(self, step: Step) -> float:
        other = next(method for method in self.methods if method.name == step.method.match)
        seeds = self.plan.options.seeds
        cells = [Cell(self.run, step.task, other.name, seed) for seed in seeds]
        saving = of_cells(cells).final_saving
        if saving is None and other.name not in self.urls:
            # Every leg of it was killed before it could tell.
            saving = self._pilot(step, other)
        if not saving:
            why = f"{other.name} saved nothing on {step.task}, so there is nothing to match"
            raise NothingToMatch(f"{step.method.name}: {why}; give random:random_ratio=R")
        return saving

    def _pilot(self, step: Step, method: Method) -> float:
        """Final saving ratio of a method on problems other than the measured ones."""
        title = f"{step.task}, {method.name} at {method.values.get('random_ratio')}: pilot"
        server = self._start(dataclasses.replace(step, method=method), method, title)
        server.clear()
        spare = self.plan.others(step.task, step.seed, PILOT_PROBLEMS, generic=False)
        spare = spare or self.plan.tasks[step.task, step.seed].problems[:PILOT_PROBLEMS]
        with self.display.bar(title, len(spare)) as advance:
            # As long as the measured ones: in long responses a method finds more to share.
            requests = [self.plan.request(problem, step.seed) for problem in spare]
            warm_up(server, requests, self.plan.options, advance)
        server.settle()
        return float(server.report().get("totals", {}).get("final_saving_ratio", 0.0))


def grade(
    cell: Cell,
    task: EvalTask,
    opens_thinking: bool,
    ask: Callable[[Sequence[Problem]], None] = lambda problems: None,
) -> list[Result]:
    """Have lm-eval grade a cell, ``ask`` called before with all problems; a result for each that was
    sent, in order. One that failed for good is wrong: leaving it out would flatter the method that
    fails most. ``opens_thinking`` is of :meth:`EvalTask.evaluate`."""

    def answer(problems: Sequence[Problem]) -> list[str]:
        ask(problems)
        answered = cell.answered()
        return [answered[p.id].text if p.id in answered else "" for p in problems]

    grades = task.evaluate(answer, opens_thinking)
    answered = cell.answered()
    failed = {row.problem_id: row.error for row in cell.responses() if row.error is not None}
    results = []
    for problem in task.problems:
        name, (score, extracted) = problem.id, grades[problem.id]
        if name in answered:
            tokens = answered[name].output_tokens
            results.append(Result(name, score == 1.0, score, extracted, "", problem.group, tokens))
        elif name in failed:
            note = f"no response: {failed[name]}"[:500]
            results.append(Result(name, False, 0.0, None, note, problem.group, 0))
    cell.write_results(results)
    return results


def summary(title: str, results: Sequence[Result], leg: Leg | None) -> str:
    words = [f"{title}: {len(results)} graded"]
    if results:
        words.append(f"score {sum(row.score for row in results) / len(results):.3f}")
    if leg is not None and leg.seconds > 0:
        words.append(f"{leg.output_tokens / leg.seconds:,.0f} tokens/s")
        saved = leg.report.get("totals", {}).get("final_saving_ratio")
        if saved is not None:
            words.append(f"{saved:.1%} saved at the end")
    return ", ".join(words)


def match(target: float, pilot: Callable[[float], float]) -> dict[str, Any]:
    """Find the ratio of random sharing whose final saving (0 to 1) is ``target``, by pilots and
    the rule of three; returns ``ratio``, ``target``, and ``pilots``: ratio and saving of each."""
    ratio = _bounded(target * _FIRST_FACTOR)
    pilots: list[list[float]] = []
    for _ in range(_MOST_PILOTS):
        saving = pilot(ratio)
        pilots.append([ratio, saving])
        if abs(saving - target) <= TOLERANCE * target:
            break
        rescaled = _bounded(ratio * target / saving if saving > 0 else 2 * ratio)
        if rescaled == ratio:
            break
        ratio = rescaled
    return {"ratio": ratio, "target": target, "pilots": pilots}


def _bounded(ratio: float) -> float:
    return min(1.0, max(_LEAST_RATIO, round(ratio, 4)))
