# SPDX-License-Identifier: Apache-2.0
"""What the flag costs where there is nothing to share: stock and ours, in turn, on random text.

Both servers stay up and take turns, so that whatever else the machine does hits
both. Requests sample at a temperature so high that the text is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Round:
    """One load on one server.

    Attributes:
        tokens_per_s: output tokens of all requests over the time they took.
        tpot_p99: seconds per output token, 99th percentile of the requests.
        scheduler_us: CPU time of the scheduler process, all its threads, for each
            output token; other work on the machine disturbs it less than clocks.
    """

    tokens_per_s: float
    tpot_p99: float
    scheduler_us: float


def load(server: ServerProcess, seed: int) -> Round:
    """Send all requests at once and wait for their ends.

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
    speed = tokens_per_s(answers)
    tpots = sorted(
        (a.ended - (a.first_token or a.started)) / max(1, a.output_tokens - 1) for a in answers
    )
    tokens = sum(a.output_tokens for a in answers)
    return Round(speed, tpots[int(0.99 * (len(tpots) - 1))], spent / tokens * 1e6)


def scheduler_seconds(server: ServerProcess) -> float:
    """CPU time that a server's scheduler process has used."""
    found = 0.0
    for child in psutil.Process(server.pid).children(recursive=True):
        if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline()):
            times = child.cpu_times()
            found += times.user + times.system
    return found


def compare(
    rounds: int, ours: Sequence[str] = EMBEDDED_FLAGS, logs: Path = Path("build/bench")
) -> tuple[list[Round], list[Round], dict[str, Any]]:
    """``rounds`` loads on each server, alternating; then what ours says it did."""
    flags = ["--enable-reasoncache", *ours]
    with (
        ServerProcess(CHECKPOINT, log_path=logs / "idle_stock.log") as stock,
        ServerProcess(CHECKPOINT, flags=flags, log_path=logs / "idle_ours.log") as shared,
    ):
        for server in (stock, shared):
            load(server, _SEED)
        found: dict[str, list[Round]] = {"stock": [], "ours": []}
        for i in range(rounds):
            order = (("stock", stock), ("ours", shared))
            for name, server in order if i % 2 == 0 else order[::-1]:
                found[name].append(load(server, _SEED + 1 + i))
        totals = shared.get("/reasoncache").json()
    return found["stock"], found["ours"], totals


def summary(rounds: int) -> dict[str, Any]:
    """Run the comparison and print a table; medians of the ratios of neighbouring rounds."""
    stock, ours, totals = compare(rounds)
    throughput = [b.tokens_per_s / a.tokens_per_s for a, b in zip(stock, ours, strict=True)]
    cpu = [b.scheduler_us / a.scheduler_us for a, b in zip(stock, ours, strict=True)]
    tpot = [b.tpot_p99 / a.tpot_p99 for a, b in zip(stock, ours, strict=True)]
    print(
        f"\n{rounds} rounds of {_REQUESTS} requests x {_MAX_TOKENS} tokens of noise, alternating\n"
    )
    print(
        "| | stock, median | ours, median | ratio, median (quartiles) |\n| --- | --- | --- | --- |"
    )
    print(
        f"| output tokens/s | {statistics.median(r.tokens_per_s for r in stock):.1f} "
        f"| {statistics.median(r.tokens_per_s for r in ours):.1f} | {Quartiles.of(throughput).text(4)} |"
    )
    print(
        f"| p99 TPOT, ms | {statistics.median(r.tpot_p99 for r in stock) * 1e3:.2f} "
        f"| {statistics.median(r.tpot_p99 for r in ours) * 1e3:.2f} | {Quartiles.of(tpot).text(4)} |"
    )
    print(
        f"| scheduler CPU, us a token | {statistics.median(r.scheduler_us for r in stock):.1f} "
        f"| {statistics.median(r.scheduler_us for r in ours):.1f} | {Quartiles.of(cpu).text(4)} |"
    )
    counts = totals["schedulers"][0]["totals"]
    print(f"\nreported by the server: {counts}")
    return {
        "idle_throughput_ratio": statistics.median(throughput),
        "idle_tpot_p99_ratio": statistics.median(tpot),
        "idle_scheduler_cpu_ratio": statistics.median(cpu),
        "idle_rounds": rounds,
        "idle_throughput_ratios": throughput,
        "idle_tpot_p99_ratios": tpot,
        "idle_scheduler_cpu_ratios": cpu,
        "idle_totals": counts,
    }


if __name__ == "__main__":
    import sys

    summary(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
