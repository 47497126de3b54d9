# SPDX-License-Identifier: Apache-2.0
"""The requests of a run, the order of its cells (task, method and seed), and the flags of its servers."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.methods import Method
from eval.runs.client import Request
from eval.runs.folder import RunError
from eval.runs.options import RunOptions
from eval.tasks.harness import EvalTask, Problem, Source
from eval.tiny_reasoner import CHECKPOINT

#: Flags for servers of the embedded model: SGLang's default limit on running requests suits large machines.
_EMBEDDED_SERVER_FLAGS = ("--max-running-requests", "128")
#: Tokens in each piece of a streamed response, except the first token, which SGLang sends at once. Pieces are
#: not smaller, because each piece costs the client some 180 us on a core that a server may need.
_STREAM_INTERVAL = "8"
_LONGEST = 32_768  # limit of a response in tokens, if neither task nor --max-tokens sets one
_WARM_UP_TOKENS = 512  # limit of a warm-up response; a large model takes minutes for more


@dataclass(frozen=True)
class Step:
    """A cell to measure."""

    task: str
    seed: int
    method: Method

    @property
    def title(self) -> str:
        return f"{self.task}, {self.method.name}, seed {self.seed}"


def order(tasks: Sequence[str], methods: Sequence[Method], seeds: Sequence[int]) -> list[Step]:
    """All methods for each task and seed, in reverse order for every second seed. So a machine that slows down
    affects all methods alike, and successive cells often need the same server."""
    return [
        Step(task, seed, method)
        for task in tasks
        for number, seed in enumerate(seeds)
        for method in methods[:: -1 if number % 2 else 1]
    ]


def model_path(options: RunOptions) -> str:
    return str(CHECKPOINT) if options.embedded else options.model


def request_body(options: RunOptions) -> dict[str, Any]:
    """The sampling fields of each request. SGLang takes parameters that are not set here from the model's
    ``generation_config.json``. The embedded model is greedy by default."""
    body: dict[str, Any] = {"max_tokens": options.max_tokens or _LONGEST}
    if options.embedded:
        body["temperature"] = 0.0
    return {**body, **options.sampling_overrides}


class Plan:
    """The problems of a run. ``body`` has the sampling fields of each request. Raises TaskError if a task
    cannot be loaded, RunError if a task has no problems."""

    def __init__(self, options: RunOptions, body: Mapping[str, Any]) -> None:
        self.options = options
        self.body = dict(body)
        pairs = itertools.product(options.tasks, options.seeds)
        self.tasks = {(name, seed): self._load(name, seed) for name, seed in pairs}

    def warm_up(self) -> list[Request]:
        """The warm-up requests: plain sums, which are not measured."""
        body = {**self.body, "max_tokens": _WARM_UP_TOKENS}
        questions = (f"What is {37 + 11 * i} + {58 + 7 * i}?" for i in range(self.options.warm_up))
        return [Request(f"sum-{i}", question, body) for i, question in enumerate(questions)]

    def request(self, problem: Problem, seed: int) -> Request:
        """The request that is sent for a problem."""
        body = {**self.body, **problem.body, "messages": problem.messages}
        limits = [limit for limit in (problem.max_tokens, self.options.max_tokens) if limit]
        if limits:
            body["max_tokens"] = min(limits)
        if samples(body):
            body["seed"] = sampling_seed(seed, problem.id)
        return Request(problem.id, "", body)

    def server_flags(self, step: Step) -> list[str]:
        """Flags of a cell's server. If the flags of two cells are equal, one server can serve both."""
        options = self.options
        task_flags = self.tasks[step.task, step.seed].server_flags
        # A model's recommended max_tokens is often its whole context. SGLang refuses a request whose prompt and
        # max_tokens together exceed the context. With --allow-auto-truncate, SGLang lowers max_tokens instead.
        flags = ["--decode-log-interval", str(options.decode_log_interval), "--allow-auto-truncate"]
        names = {flag.partition("=")[0] for flag in (*task_flags, *options.server_flags)}
        if "--stream-interval" not in names:
            flags += ["--stream-interval", _STREAM_INTERVAL]
        if options.embedded:
            flags += _EMBEDDED_SERVER_FLAGS
        if options.kv_budget is not None:
            slots = int(options.kv_budget / step.method.slot_bytes)
            flags += ["--max-total-tokens", str(slots)]
        # If tokens are sampled, --random-seed decides which, so each seed of the run needs its own server.
        if samples(self.body):
            flags += ["--random-seed", str(step.seed)]
        return [*flags, *task_flags, *options.server_flags, *step.method.flags]

    def _load(self, name: str, seed: int) -> EvalTask:
        options = self.options
        source = Source(options.data.get(name, ""), seed, options.limit, model_path(options))
        task = EvalTask(name, source)
        if not task.problems:
            raise RunError(f"--tasks: {name} has no problems")
        return task


def samples(body: Mapping[str, Any]) -> bool:
    """Whether SGLang may sample tokens. True if no temperature is set: the server's default may be above 0."""
    return bool(body.get("temperature", 1.0) > 0)


def sampling_seed(seed: int, problem_id: str) -> int:
    """The ``seed`` field of a request: 31 bits of a hash. It is the same for every method."""
    digest = hashlib.sha256(f"{seed}/{problem_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF
