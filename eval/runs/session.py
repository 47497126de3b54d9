# SPDX-License-Identifier: Apache-2.0
"""One process working on a run: every cell that is not complete, in the order of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.methods import Method, with_ratio
from eval.runs import plan
from eval.runs.cell_runner import measure, warm_up
from eval.runs.client import Request
from eval.runs.folder import Cell, RunError, write_config
from eval.runs.grading import grade_cell
from eval.runs.matching import PILOT_PROBLEMS, TOLERANCE, NothingToMatch, final_saving, match
from eval.runs.problems import ProblemSet
from eval.runs.progress import Display
from eval.runs.records import Leg, Result
from eval.runs.room import faults, refuse_what_cannot_fit, warnings
from eval.runs.servers import GivenServer, Server, Servers
from eval.serving import ServerError
from eval.tasks.sandbox import SandboxError
from eval.tasks.task import Problem, TaskError

#: Warm-up responses are not longer: those of a large model would take minutes.
_WARM_UP_TOKENS = 2048


class Session:
    """Runs what is left of a run.

    Args:
        run: its folder, locked by the caller.
        config: what its ``config.json`` holds; found ratios are added to both.
        problems: what to ask.
        methods: how to serve, in the run's order.
        body: the sampling part of each request.
        servers: where servers come from.
        display: where progress goes.
    """

    def __init__(
        self,
        run: Path,
        config: dict[str, Any],
        problems: ProblemSet,
        methods: Sequence[Method],
        body: Mapping[str, Any],
        servers: Servers,
        display: Display,
    ) -> None:
        self._run = run
        self._config = config
        self._options = problems.options
        self._problems = problems
        self._methods = list(methods)
        self._body = dict(body)
        self._servers = servers
        self._display = display
        self._urls = {
            method.name: self._options.urls[spec]
            for method, spec in zip(methods, self._options.methods, strict=True)
            if spec in self._options.urls
        }

    def work(self) -> bool:
        """Measure and grade every cell; True when no request failed and all could be graded."""
        steps = plan.order(self._options.tasks, self._methods, self._options.seeds)
        whole = True
        for step in steps:
            try:
                whole &= self._cell(step)
            except (ServerError, RunError) as error:
                # One cell that cannot be measured must not cost the others their night.
                self._display.say(f"{_title(step)}: {error}", "red")
                if not isinstance(error, NothingToMatch):
                    self._servers.close()
                whole = False
        return whole

    def _cell(self, step: plan.Step) -> bool:
        cell = self._cell_of(step.method, step.task, step.seed)
        cell.mend()
        problems = self._problems.measured(step.task, step.seed)
        answered = cell.answered()
        todo = [problem for problem in problems if problem.id not in answered]
        title = _title(step)
        leg = None
        if todo:
            server = self._server(step, title)
            slots = server.kv_slots()
            if slots is not None:
                refuse_what_cannot_fit(self._problems, step.task, slots)
                wanted = self._options.kv_budget if server.command else None
                longest = max(self._limit(problem, step.seed) for problem in todo)
                for warning in warnings(slots, wanted, longest):
                    self._display.say(f"{title}: {warning}", "yellow")
            spare = self._problems.others(step.task, step.seed, self._options.warm_up)
            with self._display.bar(f"{title}: warm-up", len(spare)) as bar:
                requests = [self._request(problem, step.seed, True) for problem in spare]
                warm_up(server, requests, self._options, bar)
            with self._display.bar(title, len(problems), len(answered)) as bar:
                requests = [self._request(problem, step.seed) for problem in todo]
                leg = measure(cell, requests, server, self._options, bar)
        return self._grade(cell, step, title, problems, leg)

    def _grade(
        self,
        cell: Cell,
        step: plan.Step,
        title: str,
        problems: Sequence[Problem],
        leg: Leg | None,
    ) -> bool:
        failed = len(problems) - len(cell.answered())
        try:
            task, opens = self._problems.task(step.task), bool(self._config["opens_thinking"])
            results = grade_cell(cell, task, problems, opens)
        except (TaskError, SandboxError) as error:
            self._display.say(f"{title}: not graded: {error}", "red")
            return False
        self._display.say(summary(title, results, leg))
        if failed:
            self._display.say(f"{title}: {failed} requests failed; run again to retry", "red")
        if leg is not None:
            limits = {problem.id: self._limit(problem, step.seed) for problem in problems}
            for fault in faults(leg, cell.responses(), limits):
                self._display.say(f"{title}: {fault}", "red")
        return not failed

    def _limit(self, problem: Problem, seed: int) -> int:
        return int(self._body_of(problem, seed, False).get("max_tokens") or 0)

    # -- servers ----------------------------------------------------------------

    def _server(self, step: plan.Step, title: str) -> Server:
        url = self._urls.get(step.method.name)
        if url is not None:
            return GivenServer(url)
        method = step.method
        if method.match:
            method = with_ratio(method, self._ratio(step))
        return self._start(step, method, title)

    def _start(self, step: plan.Step, method: Method, title: str) -> Server:
        flags = plan.server_flags(
            self._options,
            self._problems.task(step.task).server_flags(),
            method,
            step.seed,
            self._body,
        )
        return self._servers.get(
            method.name, flags, lambda: self._display.say(f"{title}: starting a server")
        )

    # -- random sharing at equal saving -----------------------------------------

    def _ratio(self, step: plan.Step) -> float:
        """The ratio of a random method for a task, found once and kept in ``config.json``."""
        ratios = self._config["random_ratios"]
        key = f"{step.task}/{step.method.name}"
        if key not in ratios:
            found = match(
                self._target(step),
                lambda ratio: self._pilot(step, with_ratio(step.method, ratio)),
            )
            ratios[key] = found.to_dict()
            write_config(self._run, self._config)
            last = found.pilots[-1][1]
            if abs(last - found.target) > TOLERANCE * found.target:
                self._display.say(
                    f"{key}: the last pilot saved {last:.1%}, not {found.target:.1%}; "
                    f"measuring at ratio {found.ratio}",
                    "yellow",
                )
        return float(ratios[key]["ratio"])

    def _target(self, step: plan.Step) -> float:
        other = next(method for method in self._methods if method.name == step.method.match)
        cells = [self._cell_of(other, step.task, seed) for seed in self._options.seeds]
        saving = final_saving(cells)
        if saving is None and other.name not in self._urls:
            # Every leg of it was killed before it could tell.
            saving = self._pilot(step, other)
        if not saving:
            raise NothingToMatch(
                f"{step.method.name}: {other.name} saved nothing on {step.task}, so there is "
                "nothing to match; give random:random_ratio=R"
            )
        return saving

    def _pilot(self, step: plan.Step, method: Method) -> float:
        """Final saving ratio of a method on problems other than the measured ones."""
        title = f"{step.task}, {' '.join(method.flags[-2:])}: pilot"
        server = self._start(dataclasses.replace(step, method=method), method, title)
        server.clear()
        spare = self._problems.others(step.task, step.seed, PILOT_PROBLEMS, generic=False)
        spare = spare or self._problems.measured(step.task, step.seed)[:PILOT_PROBLEMS]
        with self._display.bar(title, len(spare)) as bar:
            # As long as the measured ones: in long responses a method finds more to share.
            requests = [self._request(problem, step.seed) for problem in spare]
            warm_up(server, requests, self._options, bar)
        server.settle()
        return float(server.report().get("totals", {}).get("final_saving_ratio", 0.0))

    # -- small things -------------------------------------------------------------

    def _cell_of(self, method: Method, task: str, seed: int) -> Cell:
        return Cell(self._run, task, method.name, seed)

    def _request(self, problem: Problem, seed: int, short: bool = False) -> Request:
        return Request(problem.id, problem.prompt, self._body_of(problem, seed, short))

    def _body_of(self, problem: Problem, seed: int, short: bool) -> dict[str, Any]:
        body = {**self._body, **problem.extra}
        limits = [
            limit for limit in (problem.max_tokens, self._options.max_tokens) if limit is not None
        ] or [limit for limit in (body.get("max_tokens"),) if limit is not None]
        if short:
            limits.append(_WARM_UP_TOKENS)
        if limits:
            body["max_tokens"] = min(limits)
        if plan.samples(body):
            body["seed"] = plan.sampling_seed(seed, problem.id)
        return body


def _title(step: plan.Step) -> str:
    return f"{step.task}, {step.method.name}, seed {step.seed}"


def summary(title: str, results: Sequence[Result], leg: Leg | None) -> str:
    """One line about a cell."""
    words = [f"{title}: {len(results)} graded"]
    if results:
        words.append(f"score {sum(row.score for row in results) / len(results):.3f}")
    if leg is not None and leg.seconds > 0:
        words.append(f"{leg.output_tokens / leg.seconds:,.0f} tokens/s")
        saved = leg.report.get("totals", {}).get("final_saving_ratio")
        if saved is not None:
            words.append(f"{saved:.1%} saved at the end")
    return ", ".join(words)
