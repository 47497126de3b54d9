# SPDX-License-Identifier: Apache-2.0
"""Carries out a run: measures the cells (task, method and seed) not yet measured, and grades all cells."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.methods import Method, find_method
from eval.runs.cells import faults, measure, warm_up
from eval.runs.config import default_folder, make_config, settle_config
from eval.runs.folder import Cell, Result, RunError, Served, locked
from eval.runs.options import RunOptions
from eval.runs.plan import Plan, Step, model_path, order, request_body
from eval.runs.servers import Servers
from eval.runs.tuning import tuned
from eval.serving import ServerError
from eval.tasks.harness import EvalTask, Problem, opens_thinking
from eval.tiny_reasoner import EMBEDDED_SETTINGS


def say(text: str) -> None:
    tqdm.write(text)


def run(
    options: RunOptions, out: Path | None, more: Mapping[str, tuple[str, ...]] | None = None
) -> bool:
    """Begin or continue a run in ``out``, by default a folder named after the options. ``more`` maps
    methods to further flags of their servers. Returns True if every request was answered and graded. Raises
    ValueError if options or folder are wrong."""
    if options.device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        options = dataclasses.replace(options, device=device)
    defaults = EMBEDDED_SETTINGS if options.embedded else None
    methods = [
        dataclasses.replace(find_method(spec, defaults), more=(more or {}).get(spec, ()))
        for spec in options.methods
    ]
    model = model_path(options)
    plan = Plan(options, request_body(options))
    opens = opens_thinking(model)
    config = make_config(plan, methods, opens)
    folder = out or default_folder(config)
    with locked(folder):
        settle_config(folder, config)
        methods = [
            tuned(method, options, folder, run) if method.is_tuned else method for method in methods
        ]
        how = (options.device, options.keep_servers, options.prefill_flags)
        with Servers(folder, model, *how) as servers:
            whole = Session(folder, plan, methods, servers, opens).work()
    say(f"{folder}: python -m eval.report {folder}")
    return whole


@dataclass(frozen=True)
class Session:
    """A run to begin or to finish. The caller must hold the lock of the run's folder. ``opens_thinking`` is
    passed to :meth:`EvalTask.evaluate`."""

    run: Path
    plan: Plan
    methods: Sequence[Method]
    servers: Servers
    opens_thinking: bool

    def work(self) -> bool:
        """Measure missing cells, and grade all. Returns True if all were measured and no request failed."""
        options = self.plan.options
        whole = True
        for step in order(options.tasks, self.methods, options.seeds):
            try:
                whole &= self._cell(step)
            except (ServerError, RunError) as error:
                # If a cell cannot be measured, the other cells are measured nevertheless.
                say(f"{step.title}: {error}")
                self.servers.close()
                whole = False
        return whole

    def _cell(self, step: Step) -> bool:
        cell = Cell(self.run, step.task, step.method.name, step.seed)
        task = self.plan.tasks[step.task, step.seed]
        if not cell.measured:
            limits = {problem.id: self._limit(problem, step.seed) for problem in task.problems}
            served = self._measure(step, cell, task.problems)
            longest = max(limits.values())
            slots = served.kv_slots
            if longest >= slots:
                say(f"{step.title}: max_tokens is {longest}, the server has {slots} KV slots")
            for fault in faults(cell, served, limits):
                say(f"{step.title}: {fault}")
        results = grade(cell, task, self.opens_thinking)
        say(summary(step.title, results, cell.served()))
        failed = len(task.problems) - len(cell.answered())
        if failed:
            say(f"{step.title}: {failed} requests failed; delete {cell.folder} to ask again")
        return not failed

    def _measure(self, step: Step, cell: Cell, problems: Sequence[Problem]) -> Served:
        plan = self.plan
        options = self.plan.options
        method = step.method
        server = self.servers.get(method.name, plan.server_flags(step), method.env)
        if server.reports():
            say(f"{step.title}: {server.url}/reasoncache/ui shows what it shares")
        warm_up(server, plan.warm_up(), options.request_timeout)
        requests = [plan.request(problem, step.seed) for problem in problems]
        # The progress bar is redrawn rarely, because without a GPU it takes CPU time from the server.
        how: Any = dict(mininterval=0.5, leave=False, disable=None)
        with tqdm(total=len(requests), desc=step.title, **how) as bar:
            return measure(
                cell, requests, server, bar.update, log_interval=options.decode_log_interval,
                timeout_s=options.request_timeout, in_flight=options.in_flight,
                attempts=options.attempts,
            )  # fmt: skip

    def _limit(self, problem: Problem, seed: int) -> int:
        return int(self.plan.request(problem, seed).body.get("max_tokens") or 0)


def grade(cell: Cell, task: EvalTask, opens_thinking: bool) -> list[Result]:
    """Let lm-eval grade a cell. Returns a result for each problem, in order. A problem without a response
    counts as wrong, because leaving it out would favour the method that fails most."""
    answered = cell.answered()
    failed = {row.problem_id: row.error for row in cell.responses() if row.error is not None}
    texts = [answered[p.id].text if p.id in answered else "" for p in task.problems]
    grades = task.evaluate(texts, opens_thinking)
    results = []
    for problem in task.problems:
        name, (score, extracted) = problem.id, grades[problem.id]
        if name in answered:
            tokens = answered[name].output_tokens
            results.append(Result(name, score == 1.0, score, extracted, "", problem.group, tokens))
        else:
            note = f"no response: {failed.get(name)}"[:500]
            results.append(Result(name, False, 0.0, None, note, problem.group, 0))
    cell.write_results(results)
    return results


def summary(title: str, results: Sequence[Result], served: Served) -> str:
    score = sum(row.score for row in results) / len(results)
    words = [f"{title}: {len(results)} graded, score {score:.3f}"]
    if served.seconds > 0:
        words.append(f"{served.output_tokens / served.seconds:,.0f} tokens/s")
    words += [
        f"{totals['final_saving_ratio']:.1%} saved at the end"
        for totals in served.totals()
        if "final_saving_ratio" in totals
    ]
    return ", ".join(words)
