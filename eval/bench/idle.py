# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.idle ROUNDS``: what sharing costs where there is nothing to share.

A stock server and ours take turns on random text; the temperature is so high that it is noise."""

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from eval.bench.turns import as_text, by_round, spread, take_turns
from eval.measures.figures import figures
from eval.runs.client import Request, ask_all, tokens_per_s
from eval.serving import MODEL_NAME, ServerProcess, several
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
    """Send all requests at once and wait for their ends; :data:`_FIGURES`."""
    problems = generate(next(seeds), _REQUESTS)
    requests = [Request(str(i), problem.prompt, body) for i, problem in enumerate(problems)]
    before = scheduler_seconds(server)
    answers = ask_all(server.url, MODEL_NAME, requests)
    spent = scheduler_seconds(server) - before
    rate, tpot = tokens_per_s(answers), figures(answers, [], []).tpot_p99 or 0.0
    cpu = spent / sum(answer.output_tokens for answer in answers)
    return [{"throughput": rate, "tpot_p99": 1e3 * tpot, "scheduler_cpu": 1e6 * cpu}]


def scheduler_seconds(server: ServerProcess) -> float:
    """CPU time that a server's scheduler process and its children have used."""
    found = 0.0
    for child in psutil.Process(server.pid).children(recursive=True):
        if "scheduler" in child.name() or "scheduler" in " ".join(child.cmdline()):
            for one in (child, *child.children(recursive=True)):
                times = one.cpu_times()
                found += times.user + times.system
    return found


def compare(
    flags: Mapping[str, Sequence[str]], body: Mapping[str, object], rounds: int, logs: Path
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Two servers of the embedded model, by their flags, in turn with the same requests; prints
    a table. Logs go into the folder ``logs``. Returns :data:`_FIGURES`, a line a round and a
    column a server, and totals of the second if it shares. Raises RuntimeError: a request failed."""
    first, second = flags
    with several(CHECKPOINT, flags, logs) as up:
        seeds = {name: itertools.count(4_321) for name in up}
        sides = {name: functools.partial(load, one, body, seeds[name]) for name, one in up.items()}
        samples, totals = take_turns(sides, rounds), {}
        if "--enable-reasoncache" in flags[second]:
            totals = up[second].get("/reasoncache").json()["schedulers"][0]["totals"]
    found = {name: by_round(samples, name) for name in _FIGURES}
    table = pd.DataFrame(
        {
            "": title,
            **{f"{side}, median": as_text(found[name][side].median()) for side in flags},
            "ratio, median (quartiles)": as_text(spread(found[name][second] / found[name][first])),
        }
        for name, title in _FIGURES.items()
    ).to_markdown(index=False, disable_numparse=True)
    print(f"\n{rounds} rounds of {_REQUESTS} requests x {body['max_tokens']} tokens\n\n{table}")
    return found, totals


def summary(rounds: int) -> dict[str, Any]:
    """Figures of ``rounds`` loads of noise; medians of the ratios of neighbours."""
    flags = {"stock": [], "ours": ["--enable-reasoncache", *EMBEDDED_FLAGS]}
    found, totals = compare(flags, _NOISE, rounds, Path("build/bench/idle"))
    print(f"\nreported by the server: {totals}")
    results: dict[str, Any] = {"idle_rounds": rounds, "idle_totals": totals}
    for name, sides in found.items():
        ratios = sides["ours"] / sides["stock"]
        results[f"idle_{name}_ratio"] = float(ratios.median())
        results[f"idle_{name}_ratios"] = ratios.tolist()
    return results


if __name__ == "__main__":
    summary(int(sys.argv[1]) if len(sys.argv) > 1 else 32)
