# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.idle ROUNDS``: what sharing costs where there is nothing to share.

A stock server and ours stay up and take turns on random text, so that whatever else the
machine does hits both. Requests sample at a temperature so high that the text is noise.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import psutil

from eval.bench.quartiles import Quartiles
from eval.runs.client import Request, ask_all, tokens_per_s
from eval.serving import MODEL_NAME, ServerProcess
from eval.tiny_reasoner import CHECKPOINT, EMBEDDED_FLAGS
from eval.tiny_reasoner.task import generate

_REQUESTS = 32
# Short rounds: what else the machine does changes within seconds.
_MAX_TOKENS = 128
_NOISE: dict[str, object] = {"temperature": 50.0, "ignore_eos": True, "max_tokens": _MAX_TOKENS}
_SEED = 4_321
_LOGS = Path("build/bench")

#: Figure of a round -> how the table calls it.
_FIGURES = {
    "throughput": "output tokens/s",
    "tpot_p99": "p99 TPOT, ms",
    "scheduler_cpu": "scheduler CPU with the filter's process, us a token",
}


def load(server: ServerProcess, seed: int) -> dict[str, float]:
    """Send all requests at once and wait for their ends; :data:`_FIGURES`.

    Raises:
        RuntimeError: a request failed.
    """
    requests = [
        Request(str(number), problem.prompt, _NOISE)
        for number, problem in enumerate(generate(seed, _REQUESTS))
    ]
    before = scheduler_seconds(server)
    answers = ask_all(server.url, MODEL_NAME, requests)
    spent = scheduler_seconds(server) - before
    tpots = sorted(
        (a.ended - (a.first_token or a.started)) / max(1, a.output_tokens - 1) for a in answers
    )
    return {
        "throughput": tokens_per_s(answers),
        "tpot_p99": tpots[int(0.99 * (len(tpots) - 1))] * 1e3,
        "scheduler_cpu": spent / sum(a.output_tokens for a in answers) * 1e6,
    }


def scheduler_seconds(server: ServerProcess) -> float:
    """CPU time that a server's scheduler process and its children have used."""
    found = 0.0
    for child in psutil.Process(server.pid).children(recursive=True):
        if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline()):
            for one in (child, *child.children(recursive=True)):
                times = one.cpu_times()
                found += times.user + times.system
    return found


def summary(rounds: int) -> dict[str, Any]:
    """``rounds`` loads on each server, alternating; medians of the ratios of neighbours."""
    flags = ["--enable-reasoncache", *EMBEDDED_FLAGS]
    with (
        ServerProcess(CHECKPOINT, log_path=_LOGS / "idle_stock.log") as stock,
        ServerProcess(CHECKPOINT, flags=flags, log_path=_LOGS / "idle_ours.log") as shared,
    ):
        servers = (stock, shared)
        for server in servers:
            load(server, _SEED)
        found: list[list[dict[str, float]]] = [[], []]
        for i in range(rounds):
            for which in (0, 1) if i % 2 == 0 else (1, 0):
                found[which].append(load(servers[which], _SEED + 1 + i))
        totals = shared.get("/reasoncache").json()["schedulers"][0]["totals"]
    print(f"\n{rounds} rounds of {_REQUESTS} requests x {_MAX_TOKENS} tokens of noise\n")
    print("| | stock, median | ours, median | ratio, median (quartiles) |")
    print("| --- | --- | --- | --- |")
    results: dict[str, Any] = {"idle_rounds": rounds, "idle_totals": totals}
    for key, name in _FIGURES.items():
        before, after = ([each[key] for each in loads] for loads in found)
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        results[f"idle_{key}_ratio"] = statistics.median(ratios)
        results[f"idle_{key}_ratios"] = ratios
        print(
            f"| {name} | {statistics.median(before):.2f} | {statistics.median(after):.2f} "
            f"| {Quartiles.of(ratios).text(4)} |"
        )
    print(f"\nreported by the server: {totals}")
    return results


if __name__ == "__main__":
    summary(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
