# SPDX-License-Identifier: Apache-2.0
"""In which order cells are measured, and what the server of each is started with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.methods import Method
from eval.runs.options import RunOptions

#: Of the embedded model's servers: SGLang's own default is meant for large machines.
_EMBEDDED_SERVER_FLAGS = ("--max-running-requests", "128")
#: Tokens between two pieces of a streamed response, the first piece excepted, which SGLang
#: sends at once: a piece costs the client some 180 us, on a core that a server may need.
_STREAM_INTERVAL = 8


@dataclass(frozen=True)
class Step:
    """One cell to measure."""

    task: str
    seed: int
    method: Method


def order(tasks: Sequence[str], methods: Sequence[Method], seeds: Sequence[int]) -> list[Step]:
    """For each task and seed each method, backwards in every second seed.

    What drifts over hours (a warm machine, other users) then hits all methods alike, and two
    neighbouring cells often need the same server. In a task's first seed a method that must
    reach another's saving comes after it.
    """
    steps = []
    for task in tasks:
        for number, seed in enumerate(seeds):
            turn = list(methods) if number % 2 == 0 else list(reversed(methods))
            if number == 0:
                turn.sort(key=lambda method: bool(method.match))
            steps += [Step(task, seed, method) for method in turn]
    return steps


def server_flags(
    options: RunOptions,
    task_flags: Sequence[str],
    method: Method,
    seed: int,
    body: Mapping[str, Any],
) -> list[str]:
    """Flags of a cell's server: equal lists mean that one server can serve both cells.

    Args:
        options: of the run.
        task_flags: what the task asks for.
        method: its flags come last.
        seed: of the cell; without greedy decoding a server of another seed draws other numbers.
        body: the sampling part of each request.
    """
    # The makers' max_tokens is often the whole context: with a prompt before it SGLang would
    # refuse the request instead of shortening the response.
    flags = [
        "--decode-log-interval",
        str(options.decode_log_interval),
        "--allow-auto-truncate",
    ]
    given = {flag.partition("=")[0] for flag in (*task_flags, *options.server_flags)}
    if "--stream-interval" not in given:
        flags += ["--stream-interval", str(_STREAM_INTERVAL)]
    if options.embedded:
        flags += _EMBEDDED_SERVER_FLAGS
    if options.kv_budget is not None:
        flags += ["--max-total-tokens", str(options.kv_budget)]
    if samples(body):
        flags += ["--random-seed", str(seed)]
    return [*flags, *task_flags, *options.server_flags, *method.flags]


def samples(body: Mapping[str, Any]) -> bool:
    """Whether requests draw tokens; a body without temperature leaves that to the server."""
    return bool(body.get("temperature", 1.0) > 0)


def sampling_seed(seed: int, problem_id: str) -> int:
    """The ``seed`` of a request, the same for every method: 31 bits of a hash."""
    digest = hashlib.sha256(f"{seed}/{problem_id}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFF_FFFF
