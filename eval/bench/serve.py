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
from eval.measures.figures import of_cells
from eval.redundancy.rows import texts_of
from eval.replay.__main__ import MODELS
from eval.replay.model import build
from eval.replay.pieces import write_pieces
from eval.runs.folder import Cell, RunError
from eval.runs.options import RunOptions
from eval.runs.work import run
from eval.tasks.documents import replay
from eval.tokenizers import load_tokenizer

DENSE, OURS, RANDOM = "dense", "reasoncache", "random"


@dataclass(frozen=True)
class Workload:
    """What is asked of the servers.

    ``traces`` is a file of recorded responses, "" for the embedded reasoner; ``limit`` are the
    problems of one round, ``kv_budget`` the KV slots of each server (see :func:`crowding`). With
    ``piece`` responses of over :data:`LOOPING` tokens are cut into pieces of this length.
    """

    name: str
    traces: str
    ours: str
    limit: int
    rounds: int
    kv_budget: int
    piece: int = 0

    @property
    def methods(self) -> list[str]:
        return [DENSE, self.ours] if self.traces else [DENSE, self.ours, RANDOM]


#: Responses of the AIME file that are longer go round in circles up to the limit of the model
#: that wrote them; the next shorter one has 14,406 tokens.
LOOPING = 20_000
WORKLOADS = (
    Workload("tiny_reasoner", "", OURS, limit=32, rounds=2, kv_budget=4000),
    Workload(
        "aime24_replay",
        "aime24_sky_t1_32b.jsonl",
        f"{OURS}:block=8",
        # Equal lengths run in waves, 2 at a time where nothing is shared, up to 4 with sharing:
        # a number that fills the last wave of either.
        limit=8,
        rounds=2,
        kv_budget=8000,
        piece=3000,
    ),
    Workload(
        "math500_replay",
        "math500_sky_t1_27b.jsonl",
        f"{OURS}:block=8",
        limit=8,
        rounds=1,
        kv_budget=4000,
    ),
)
#: The same for all, so that what differs is the memory: an admission that fills the pool.
#: SGLang's documentation advises 0.3 where requests wait beside free slots.
SERVER_FLAGS = ("--schedule-conservativeness", "0.3")


#: A round is refused below.
LEAST_CROWDING = 1.4


def crowding(lengths: Sequence[int], kv_budget: int) -> float:
    """How many times longer a round takes for lack of memory than its longest response alone.

    A response of n tokens holds n/2 slots over n steps. Near 1 a round measures the
    longest response and not the memory.
    """
    return sum(n * n / 2 for n in lengths) / kv_budget / max(lengths)


def refuse_a_half_empty_pool(path: Path, model: str, limit: int, kv_budget: int) -> None:
    """Raises RunError if a round of replays would not be short of memory."""
    lengths = list(replay(str(path), model, limit)["test"]["max_tokens"])
    crowded = crowding(lengths, kv_budget)
    if crowded < LEAST_CROWDING:
        raise RunError(
            f"{path}: {kv_budget} KV slots leave room for everyone "
            f"(crowding {crowded:.1f}, at least {LEAST_CROWDING})"
        )


def measure(workload: Workload, traces: Path, model: str, out: Path) -> dict[str, Any]:
    """Run one workload and sum it up.

    Raises:
        RunError: a round would not be short of memory.
    """
    options: dict[str, Any] = {}
    if workload.traces:
        # Greedy, though every token is forced: a server that draws is started anew for each seed.
        path = traces / workload.traces
        if workload.piece:
            whole = list(replay(str(path), model)["test"])
            path = out.parent / f"{workload.name}-pieces.jsonl"
            write_pieces(whole, load_tokenizer(model), (workload.piece,), LOOPING, path)
        options = {"model": model, "data": {workload.name: str(path)}, "temperature": 0.0}
        refuse_a_half_empty_pool(path, model, workload.limit, workload.kv_budget)
    run(
        RunOptions(
            tasks=(workload.name,),
            methods=tuple(workload.methods),
            seeds=tuple(range(workload.rounds)),
            limit=workload.limit,
            kv_budget=workload.kv_budget,
            device="cpu",
            warm_up=2 if workload.traces else 8,
            keep_servers=len(workload.methods),
            server_flags=SERVER_FLAGS,
            **options,
        ),
        out,
    )
    return summarise(workload, out)


def summarise(workload: Workload, out: Path) -> dict[str, Any]:
    """Figures of a finished run; ratios are ours over dense, round by round."""
    cells = {
        name: [Cell(out, workload.name, name, seed) for seed in range(workload.rounds)]
        for name in workload.methods
    }
    seen = {name: of_cells(row) for name, row in cells.items()}
    results = {
        name: keyed({cell.seed: cell.results() for cell in row}) for name, row in cells.items()
    }
    scores = {name: accuracy(row) for name, row in results.items()}
    speeds = {name: [_tokens_per_s(cell) for cell in row] for name, row in cells.items()}
    ratios = [b / a for a, b in zip(speeds[DENSE], speeds[workload.ours], strict=True)]
    found: dict[str, Any] = {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "memory_saving_ratio": seen[workload.ours].saving,
        "final_saving_ratio": seen[workload.ours].final_saving,
        "tokens_per_s": speeds,
        "mean_running": {name: one.mean_running for name, one in seen.items()},
        "retractions": {name: one.retractions for name, one in seen.items()},
        "leaked_slots": {name: one.leaked_slots for name, one in seen.items()},
        "failed_requests": {name: one.failed for name, one in seen.items()},
        "accuracy": {name: one.value if one else None for name, one in scores.items()},
    }
    if not workload.traces:
        found["accuracy_ratio"] = _kept(results, workload.ours)
        found["random_accuracy_ratio"] = _kept(results, RANDOM)
        found["random_final_saving_ratio"] = seen[RANDOM].final_saving
    return found


def _tokens_per_s(cell: Cell) -> float:
    found = of_cells([cell]).tokens_per_s
    if found is None:
        raise RunError(f"{cell.folder}: not measured in one go; start over in a new folder")
    return found


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
        if any(w.traces for w in chosen):
            files = [args.traces / w.traces for w in WORKLOADS if w.traces]
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
