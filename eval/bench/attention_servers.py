# SPDX-License-Identifier: Apache-2.0
"""Two stock servers of the embedded model that differ in the attention backend alone, in turn."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from eval.bench.quartiles import Quartiles
from eval.runs.client import Request, ask_all, tokens_per_s
from eval.serving import MODEL_NAME, ServerProcess
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate
from sglang_reasoncache import compat

_SEED = 5


def serve(rounds: int, logs: Path, requests: int = 32, max_tokens: int = 512) -> dict[str, Any]:
    """Output tokens/s of both; prints a table.

    Raises:
        RuntimeError: a request failed.
    """
    speeds: dict[str, list[float]] = {"torch_native": [], compat.CPU_BACKEND: []}
    servers = {
        name: ServerProcess(
            CHECKPOINT,
            flags=["--max-total-tokens", "40000", "--attention-backend", name],
            log_path=logs / f"attention_{name}.log",
        )
        for name in speeds
    }
    body = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    with servers["torch_native"], servers[compat.CPU_BACKEND]:
        for number in range(rounds + 1):
            asked = [
                Request(str(index), problem.prompt, body)
                for index, problem in enumerate(generate(_SEED + number, requests))
            ]
            for name in list(speeds)[:: 1 if number % 2 else -1]:
                speed = tokens_per_s(ask_all(servers[name].url, MODEL_NAME, asked))
                if number:  # the first round warms up
                    speeds[name].append(speed)
    ratios = Quartiles.of([b / a for a, b in zip(*speeds.values(), strict=True)])
    medians = [statistics.median(values) for values in speeds.values()]
    print(f"\n{rounds} rounds of {requests} requests x {max_tokens} tokens, embedded model\n")
    print(f"| | {' | '.join(speeds)} | ratio |\n| --- | --- | --- | --- |")
    print(f"| output tokens/s | {medians[0]:.0f} | {medians[1]:.0f} | {ratios.text(2)} |")
    return {"server_tokens_per_s_ratio": ratios.median, "server_tokens_per_s": speeds}
