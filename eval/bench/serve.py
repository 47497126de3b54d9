# SPDX-License-Identifier: Apache-2.0
"""``make bench-serve``: throughput, saving and accuracy of three workloads in twenty minutes on two cores.

Stock SGLang and ours stay up and take turns, with the same KV budget, attention backend and
flags; the embedded reasoner is also served with random sharing that saves as much. Writes
``build/bench/serve.json``, and a run folder for each workload.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.measures.accuracy import accuracy, compare, keyed
from eval.measures.memory import memory
from eval.replay.__main__ import MODELS, texts_of
from eval.replay.model import build
from eval.runs.folder import Cell, RunError
from eval.runs.options import make_options
from eval.runs.work import run

DENSE, OURS, RANDOM = "dense", "reasoncache", "random"


@dataclass(frozen=True)
class Workload:
    """What is asked of the servers.

    Attributes:
        name: of the task.
        traces: file of recorded responses, "" for the embedded reasoner.
        limit: problems of one round.
        rounds: how often each method takes its turn; the reasoner's rounds have
            different problems, a replay's the same.
        kv_budget: KV slots of each server.
        ours: our method, as in ``eval.run --methods``.
    """

    name: str
    traces: str
    limit: int
    rounds: int
    kv_budget: int
    ours: str = OURS

    @property
    def replays(self) -> bool:
        return bool(self.traces)

    @property
    def methods(self) -> list[str]:
        return [DENSE, self.ours] if self.replays else [DENSE, self.ours, RANDOM]


WORKLOADS = (
    Workload("tiny_reasoner", "", limit=80, rounds=2, kv_budget=4000),
    Workload("aime24_replay", "aime24_sky_t1_32b.jsonl", limit=8, rounds=1, kv_budget=60_000),
    Workload("math500_replay", "math500_sky_t1_27b.jsonl", limit=40, rounds=2, kv_budget=12_000),
)


def measure(workload: Workload, traces: Path, model: str, out: Path) -> dict[str, Any]:
    """Run one workload and sum it up."""
    values: dict[str, Any] = {
        "tasks": [workload.name],
        "methods": workload.methods,
        "seeds": list(range(workload.rounds)),
        "limit": workload.limit,
        "kv_budget": workload.kv_budget,
        "device": "cpu",
        "warm_up": 2 if workload.replays else 8,
        "keep_servers": 2,
    }
    if workload.replays:
        # Greedy, though every token is forced: a server that draws is started anew for each seed.
        values |= {
            "model": model,
            "data": {workload.name: str(traces / workload.traces)},
            "temperature": 0.0,
        }
    run(make_options(values), out)
    return summarise(workload, out)


def summarise(workload: Workload, out: Path) -> dict[str, Any]:
    """Figures of a finished run; ratios are ours over dense, round by round."""
    cells = {
        name: [Cell(out, workload.name, name, seed) for seed in range(workload.rounds)]
        for name in workload.methods
    }
    speeds = {name: [_tokens_per_s(cell) for cell in row] for name, row in cells.items()}
    ratios = [b / a for a, b in zip(speeds[DENSE], speeds[workload.ours], strict=True)]
    saved = _memory(cells[workload.ours])
    found = {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "memory_saving_ratio": saved.saving,
        "final_saving_ratio": saved.final_saving,
        "tokens_per_s": speeds,
        "mean_running": {name: _running(row) for name, row in cells.items()},
        "retractions": {name: _memory(row).retractions for name, row in cells.items()},
        "leaked_slots": {name: _memory(row).leaked_slots for name, row in cells.items()},
        "failed_requests": {name: sum(map(_failed, row)) for name, row in cells.items()},
    }
    results = {
        name: keyed({cell.seed: cell.results() for cell in row}) for name, row in cells.items()
    }
    found["accuracy"] = {
        name: estimate.value if (estimate := accuracy(row)) else None
        for name, row in results.items()
    }
    if not workload.replays:
        found["accuracy_ratio"] = _kept(results, workload.ours)
        found["random_accuracy_ratio"] = _kept(results, RANDOM)
        found["random_final_saving_ratio"] = _memory(cells[RANDOM]).final_saving
    return found


def _tokens_per_s(cell: Cell) -> float:
    legs = cell.legs()
    seconds = sum(leg.seconds for leg in legs)
    if not seconds:
        raise RunError(f"{cell.folder}: nothing was measured")
    return sum(leg.output_tokens for leg in legs) / seconds


def _memory(cells: Sequence[Cell]) -> Any:
    return memory(
        [leg for cell in cells for leg in cell.legs()],
        [moment for cell in cells for moment in cell.timeline()],
    )


def _running(cells: Sequence[Cell]) -> float | None:
    running = [moment.running for cell in cells for moment in cell.timeline()]
    return statistics.fmean(running) if running else None


def _failed(cell: Cell) -> int:
    return sum(row.error is not None for row in cell.responses())


def _kept(results: dict[str, Any], method: str) -> float | None:
    against = compare(results[method], results[DENSE])
    return None if against is None or against.kept is None else against.kept.value


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.serve", description=__doc__.splitlines()[0]
    )
    parser.add_argument("traces", type=Path, help="folder of recorded responses, JSONL")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument(
        "--workloads", default=",".join(w.name for w in WORKLOADS), help="default: all"
    )
    args = parser.parse_args(argv)
    names = args.workloads.split(",")
    unknown = set(names) - {w.name for w in WORKLOADS}
    if unknown:
        parser.error(f"--workloads: unknown {', '.join(sorted(unknown))}")
    chosen = [w for w in WORKLOADS if w.name in names]
    model = ""
    try:
        if any(w.replays for w in chosen):
            files = [args.traces / w.traces for w in WORKLOADS if w.replays]
            model = str(build(MODELS, texts_of(files)))
        result: dict[str, Any] = {}
        for workload in chosen:
            folder = args.out / "serve" / f"{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}"
            result[workload.name] = measure(workload, args.traces, model, folder)
            path = args.out / "serve.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"bench-serve: {error}")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
