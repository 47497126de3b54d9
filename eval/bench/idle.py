# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.idle ROUNDS``: what sharing costs where there is nothing to share.

A stock server and ours stay up and take turns on random text, so that whatever else the
machine does hits both. Requests sample at a temperature so high that the text is noise.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from eval.bench.turns import as_text, by_round, spread, take_turns
from eval.runs.client import Request, ask_all, tokens_per_s
from eval.serving import MODEL_NAME, ServerProcess
from eval.tiny_reasoner import CHECKPOINT, EMBEDDED_FLAGS
from eval.tiny_reasoner.task import generate

_REQUESTS = 32
# Short rounds: what else the machine does changes within seconds.
_NOISE: dict[str, object] = {"temperature": 50.0, "ignore_eos": True, "max_tokens": 128}
#: Figure of a round -> how the table calls it.
_FIGURES = {
    "throughput": "output tokens/s",
    "tpot_p99": "p99 TPOT, ms",
    "scheduler_cpu": "scheduler CPU with the filter's process, us a token",
}


def load(
    server: ServerProcess, body: Mapping[str, object], seeds: Iterator[int]
) -> list[dict[str, float]]:
    """Send all requests at once and wait for their ends; :data:`_FIGURES`.

    Raises:
        RuntimeError: a request failed.
    """
    problems = generate(next(seeds), _REQUESTS)
    requests = [Request(str(i), problem.prompt, body) for i, problem in enumerate(problems)]
    before = scheduler_seconds(server)
    answers = ask_all(server.url, MODEL_NAME, requests)
    spent = scheduler_seconds(server) - before
    tpots = [
        (a.ended - (a.first_token or a.started)) / max(1, a.output_tokens - 1) for a in answers
    ]
    return [
        {
            "throughput": tokens_per_s(answers),
            "tpot_p99": float(np.percentile(tpots, 99, method="lower")) * 1e3,
            "scheduler_cpu": spent / sum(a.output_tokens for a in answers) * 1e6,
        }
    ]


def scheduler_seconds(server: ServerProcess) -> float:
    """CPU time that a server's scheduler process and its children have used."""
    found = 0.0
    for child in psutil.Process(server.pid).children(recursive=True):
        if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline()):
            for one in (child, *child.children(recursive=True)):
                times = one.cpu_times()
                found += times.user + times.system
    return found


def in_turn(
    servers: Mapping[str, ServerProcess], body: Mapping[str, object], rounds: int
) -> pd.DataFrame:
    """Loads on each server, alternating, after one that warms up; each has the same requests."""
    sides = {
        name: functools.partial(load, server, body, itertools.count(4_321))
        for name, server in servers.items()
    }
    return take_turns(sides, rounds, warm_up_rounds=1)


def summary(rounds: int) -> dict[str, Any]:
    """Figures of ``rounds`` loads; medians of the ratios of neighbours."""
    logs = Path("build/bench")
    flags = ["--enable-reasoncache", *EMBEDDED_FLAGS]
    with (
        ServerProcess(CHECKPOINT, log_path=logs / "idle_stock.log") as stock,
        ServerProcess(CHECKPOINT, flags=flags, log_path=logs / "idle_ours.log") as shared,
    ):
        found = in_turn({"stock": stock, "ours": shared}, _NOISE, rounds)
        totals = shared.get("/reasoncache").json()["schedulers"][0]["totals"]
    results: dict[str, Any] = {"idle_rounds": rounds, "idle_totals": totals}
    lines = []
    for key, name in _FIGURES.items():
        figures = by_round(found, key)
        ratios = figures["ours"] / figures["stock"]
        results[f"idle_{key}_ratio"] = float(ratios.median())
        results[f"idle_{key}_ratios"] = ratios.tolist()
        medians = [as_text(figures[side].median(), 2) for side in ("stock", "ours")]
        lines.append([name, *medians, as_text(spread(ratios), 4)])
    heads = ["", "stock, median", "ours, median", "ratio, median (quartiles)"]
    table = pd.DataFrame(lines, columns=heads).to_markdown(index=False, disable_numparse=True)
    print(f"\n{rounds} rounds of {_REQUESTS} requests x {_NOISE['max_tokens']} tokens of noise\n")
    print(f"{table}\n\nreported by the server: {totals}")
    return results


if __name__ == "__main__":
    summary(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
