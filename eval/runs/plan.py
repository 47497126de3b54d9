# SPDX-License-Identifier: Apache-2.0
"""What a run asks: problems, requests, servers' flags, and the order of its cells."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.methods import Method
from eval.runs.client import Request
from eval.runs.folder import RunError
from eval.runs.options import RunOptions
from eval.tasks.harness import EvalTask, Problem, Source, TaskError
from eval.tasks.sampling import sampling_for
from eval.tiny_reasoner import CHECKPOINT
from eval.tokenizers import load_tokenizer

#: For servers of the embedded model: SGLang's own default is meant for large machines.
_EMBEDDED_SERVER_FLAGS = ("--max-running-requests", "128")
#: Tokens between two pieces of a streamed response but the first, which SGLang sends at once: a
#: piece costs the client some 180 us, on a core that a server may need.
_STREAM_INTERVAL = "8"
_OTHER_SEED = 1_000_003  # added to a seed for problems that no cell measures
_WARM_UP_TOKENS = 2048  # the longest warm-up response: those of a large model would take minutes
_SPARE_SLOTS = 2  # that SGLang leaves free in its pool after prompt and longest response


@dataclass(frozen=True)
class Step:
    """One cell to measure."""

    task: str
    seed: int
    method: Method

    @property
    def title(self) -> str:
        return f"{self.task}, {self.method.name}, seed {self.seed}"


def order(tasks: Sequence[str], methods: Sequence[Method], seeds: Sequence[int]) -> list[Step]:
    """For each task and seed each method, backwards in every second seed: drift hits all alike, and
    neighbours often need the same server. In a task's first seed a method that must reach another's
    saving comes after it."""
    first = sorted(methods, key=lambda method: bool(method.match))
    turns = [first, *([methods[::-1], methods] * len(seeds))]
    return [
        Step(task, seed, method)
        for task in tasks
        for seed, turn in zip(seeds, turns, strict=False)
        for method in turn
    ]


def model_path(options: RunOptions) -> str:
    return str(CHECKPOINT) if options.embedded else options.model


def request_body(options: RunOptions) -> dict[str, Any]:
    """The sampling part of each request: the model family's own, and what was set by hand."""
    body = {**sampling_for(options.model), **options.sampling_overrides}
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    return body


class Plan:
    """The problems of a run, and others to warm up with; ``body`` is the sampling part of each
    request. Raises TaskError, RunError: a task cannot be loaded, or a replay cannot fit."""

    def __init__(self, options: RunOptions, body: Mapping[str, Any]) -> None:
        self.options = options
        self.body = dict(body)
        pairs = itertools.product(options.tasks, options.seeds)
        self.tasks = {(name, seed): self._load(name, seed, options.limit) for name, seed in pairs}
        self._others: dict[tuple[str, int], list[Problem]] = {}
        if options.kv_budget is not None:
            for name in options.tasks:
                self.refuse_what_cannot_fit(name, options.kv_budget)

    def others(self, task: str, seed: int, count: int, generic: bool = True) -> list[Problem]:
        """Up to ``count`` problems that no cell measures, with ``generic`` filled up by plain sums."""
        if (task, seed) not in self._others:
            several = (self.tasks[task, one].problems for one in self.options.seeds)
            asked = [problem.messages for problems in several for problem in problems]
            try:
                found = self._load(task, seed + _OTHER_SEED, None).problems
            except TaskError:
                found = []
            self._others[task, seed] = [p for p in found if p.messages not in asked]
        spare = self._others[task, seed][:count]
        return spare + [_sum(number) for number in range(count - len(spare)) if generic]

    def request(self, problem: Problem, seed: int, short: bool = False) -> Request:
        """What is sent; ``short`` for a warm-up."""
        body = {**self.body, **problem.body, "messages": problem.messages}
        limits = [limit for limit in (problem.max_tokens, self.options.max_tokens) if limit]
        if not limits and body.get("max_tokens"):
            limits = [body["max_tokens"]]
        limits += [_WARM_UP_TOKENS] if short else []
        if limits:
            body["max_tokens"] = min(limits)
        if samples(body):
            body["seed"] = sampling_seed(seed, problem.id)
        return Request(problem.id, "", body)

    def server_flags(self, step: Step, method: Method) -> list[str]:
        """Flags of a cell's server: equal lists mean that one server can serve both cells."""
        options, task_flags = self.options, self.tasks[step.task, step.seed].server_flags
        # The makers' max_tokens is often the whole context: with a prompt before it SGLang would
        # refuse the request instead of shortening the response.
        flags = ["--decode-log-interval", str(options.decode_log_interval), "--allow-auto-truncate"]
        given = {flag.partition("=")[0] for flag in (*task_flags, *options.server_flags)}
        if "--stream-interval" not in given:
            flags += ["--stream-interval", _STREAM_INTERVAL]
        if options.embedded:
            flags += _EMBEDDED_SERVER_FLAGS
        if options.kv_budget is not None:
            flags += ["--max-total-tokens", str(options.kv_budget)]
        # Without greedy decoding a server of another seed draws other numbers.
        if samples(self.body):
            flags += ["--random-seed", str(step.seed)]
        return [*flags, *task_flags, *options.server_flags, *method.flags]

    def refuse_what_cannot_fit(self, task: str, slots: int) -> None:
        """A replay cut short would be no replay. Raises RunError: prompt and forced tokens of one
        need more than ``slots``."""
        asked = (p for seed in self.options.seeds for p in self.tasks[task, seed].problems)
        for problem in {p.id: p for p in asked if p.forced}.values():
            prompt = load_tokenizer(model_path(self.options)).apply_chat_template(
                problem.messages, add_generation_prompt=True, return_dict=False
            )
            needed = len(prompt) + (problem.max_tokens or 0) + _SPARE_SLOTS
            if needed > slots:
                what = f"its prompt and its {problem.max_tokens} forced tokens, got {slots}"
                where = f"--kv-budget: {task}: problem {problem.id!r}"
                raise RunError(f"{where} needs at least {needed} KV slots for {what}")

    def _load(self, name: str, seed: int, limit: int | None) -> EvalTask:
        options = self.options
        file, model = options.data.get(name, ""), model_path(options)
        task = EvalTask(name, Source(file, seed, limit, model, options.allow_code_execution))
        if not task.problems:
            raise RunError(f"--tasks: {name} has no problems")
        return task


def samples(body: Mapping[str, Any]) -> bool:
    """Whether requests draw tokens; a body without temperature leaves that to the server."""
    return bool(body.get("temperature", 1.0) > 0)


def sampling_seed(seed: int, problem_id: str) -> int:
    """The ``seed`` of a request, the same for every method: 31 bits of a hash."""
    digest = hashlib.sha256(f"{seed}/{problem_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF


def _sum(number: int) -> Problem:
    a, b = 37 + 11 * number, 58 + 7 * number
    question = f"What is {a} + {b}? Think step by step."
    return Problem(f"sum-{number}", [{"role": "user", "content": question}], {})
