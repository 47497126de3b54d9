# SPDX-License-Identifier: Apache-2.0
"""``make bench-serve``: throughput, saving and accuracy of three workloads in twenty minutes on two cores.

Stock SGLang and ours take turns, with the same KV budget, backend and flags; the embedded reasoner
also with random sharing that saves as much. Writes ``serve.json``, and a run folder a workload."""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.bench import AIME
from eval.jsonl import texts_of
from eval.measures.accuracy import accuracy, compare, keyed
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.replay.__main__ import MODELS
from eval.replay.model import build
from eval.runs.folder import Cell, RunError, write_whole
from eval.runs.options import RunOptions
from eval.runs.work import run
from eval.tasks.documents import replay
from eval.tokenizers import load_tokenizer

_STEP = re.compile(r".*?\n\n|.+\Z", re.DOTALL)


def cut(response: str, tokenizer: Any, tokens: int) -> list[str]:
    """Whole steps of a response in pieces of about ``tokens`` tokens; the remainder is left out. A
    piece ends with the step that reaches so many."""
    pieces: list[str] = []
    begun: list[str] = []
    length = 0
    for step in _STEP.findall(response):
        begun.append(step)
        length += len(tokenizer.encode(step, add_special_tokens=False, verbose=False))
        if length >= tokens:
            pieces.append("".join(begun))
            begun, length = [], 0
    return pieces


def write_pieces(
    rows: Sequence[Mapping[str, Any]], tokenizer: Any, tokens: Sequence[int], least: int, path: Path
) -> int:
    """Write the pieces of all rows of at least ``least`` tokens as JSONL; return how many.
    ``tokens`` are lengths of pieces, in turn for each row."""
    long = [row for row in rows if row["max_tokens"] >= least]
    lines = [
        {"id": f"{row['id']}.{at}", "question": row["prompt"], "response": piece}
        for number, row in enumerate(long)
        for at, piece in enumerate(cut(row["target"], tokenizer, tokens[number % len(tokens)]))
    ]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))
    return len(lines)


_MATH = "math500_sky_t1_27b.jsonl"
#: Responses of the AIME file that are longer go round in circles up to the limit of the model
#: that wrote them; the next shorter one has 14,406 tokens.
LOOPING = 20_000
#: The same for all, so that what differs is the memory: an admission that fills the pool.
#: SGLang's documentation advises 0.3 where requests wait beside free slots.
SERVER_FLAGS = ("--schedule-conservativeness", "0.3")
#: How many times longer a round must take for lack of memory than its longest response alone;
#: near 1 it measures the longest response and not the memory.
_LEAST_CROWDING = 1.4


class Workload(NamedTuple):
    """``limit`` are the problems of one round, ``kv_budget`` the KV slots of each server; ``traces``
    is a file of recorded responses, "" for the embedded reasoner; ``pieces`` see :func:`pieces_of`."""

    name: str
    methods: tuple[str, ...]
    limit: int
    rounds: int
    kv_budget: int
    traces: str = ""
    pieces: tuple[int, ...] = ()


_OURS, _RANDOM = "newest", "random:match=newest"
WORKLOADS = [
    Workload("tiny_reasoner", (DENSE, _OURS, _RANDOM), 32, rounds=2, kv_budget=4000),
    # Equal lengths run in waves, 2 at a time where nothing is shared, up to 4 with sharing: 8 fill
    # the last wave of either.
    Workload(
        "aime24_replay", (DENSE, _OURS), 8, rounds=2, kv_budget=8000, traces=AIME, pieces=(3000,)
    ),
    Workload("math500_replay", (DENSE, _OURS), 8, rounds=1, kv_budget=4000, traces=_MATH),
]


def pieces_of(
    traces: Path, model: str, pieces: Sequence[int], limit: int, kv_budget: int, path: Path
) -> Path:
    """Responses to replay, ``limit`` in a round: ``traces``, or pieces of these lengths of its
    looping ones, written to ``path``: shorter, but they repeat themselves nearly as much. Raises
    OSError, ValueError: bad traces, or a round would not be short of memory."""
    if pieces:
        whole = list(replay(str(traces), model)["test"])
        write_pieces(whole, load_tokenizer(model), pieces, LOOPING, path)
    path = path if pieces else traces
    lengths = list(replay(str(path), model, limit)["test"]["max_tokens"])
    # A response of n tokens holds n/2 slots over n steps.
    crowding = sum(n * n / 2 for n in lengths) / kv_budget / max(lengths)
    if crowding < _LEAST_CROWDING:
        found = f"(crowding {crowding:.1f}, at least {_LEAST_CROWDING})"
        raise RunError(f"{path}: {kv_budget} KV slots leave room for everyone {found}")
    return path


def run_in_turns(
    task: str, methods: Sequence[str], rounds: int, out: Path, **options: Any
) -> dict[str, list[Cell]]:
    """Servers of all methods stay up and take turns, in the opposite order in every second round;
    the cells of each. ``options`` as of :class:`RunOptions`."""
    seeds = tuple(range(rounds))
    several: dict[str, Any] = {"tasks": (task,), "methods": tuple(methods), "seeds": seeds}
    run(RunOptions(**several, device="cpu", keep_servers=len(methods), **options), out)
    return {name: [Cell(out, task, name, seed) for seed in seeds] for name in methods}


def measure(workload: Workload, traces: Path, model: str, out: Path) -> dict[str, Any]:
    """Run one workload and sum it up; ratios are ours over dense, round by round."""
    name, methods, limit, rounds, kv_budget, file, pieces = workload
    options: dict[str, Any] = {"warm_up": 8}
    if file:
        path = out.parent / f"{name}-pieces.jsonl"
        path = pieces_of(traces / file, model, pieces, limit, kv_budget, path)
        # Greedy, though every token is forced: a server that draws is started anew for each seed.
        options = {"model": model, "data": {name: str(path)}, "temperature": 0.0, "warm_up": 2}
    options |= {"limit": limit, "kv_budget": kv_budget, "server_flags": SERVER_FLAGS}
    cells = run_in_turns(name, methods, rounds, out, **options)
    ours = methods[1]
    seen = {name: of_cells(row) for name, row in cells.items()}
    results = {name: keyed({one.seed: one.results() for one in row}) for name, row in cells.items()}
    scores = {name: accuracy(row) for name, row in results.items()}
    speeds = {name: [tokens_per_s(cell) for cell in row] for name, row in cells.items()}
    ratios = [b / a for a, b in zip(speeds[DENSE], speeds[ours], strict=True)]
    found: dict[str, Any] = {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "memory_saving_ratio": seen[ours].saving,
        "final_saving_ratio": seen[ours].final_saving,
        "tokens_per_s": speeds,
        "failed_requests": {name: one.failed for name, one in seen.items()},
        "accuracy": {name: one.value if one else None for name, one in scores.items()},
    }
    for figure in ("mean_running", "retractions", "leaked_slots"):
        found[figure] = {name: getattr(one, figure) for name, one in seen.items()}
    if _RANDOM in methods:
        for key, method in (("accuracy_ratio", ours), ("random_accuracy_ratio", _RANDOM)):
            against = compare(results[method], results[DENSE])
            found[key] = against.kept.value if against and against.kept else None
        found["random_final_saving_ratio"] = seen[_RANDOM].final_saving
    return found


def tokens_per_s(cell: Cell) -> float:
    found = of_cells([cell]).tokens_per_s
    if found is None:
        raise RunError(f"{cell.folder}: not measured in one go; start over in a new folder")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.serve", description=__doc__.splitlines()[0]
    )
    names = [work.name for work in WORKLOADS]
    parser.add_argument("traces", type=Path, help="folder of recorded responses, JSONL")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, help="default: all")
    args = parser.parse_args(argv)
    chosen = [work for work in WORKLOADS if work.name in args.workloads]
    model, result = "", {}
    try:
        if any(work.traces for work in chosen):
            model = str(build(MODELS, texts_of([args.traces / name for name in (AIME, _MATH)])))
        for work in chosen:
            folder = args.out / "serve" / f"{work.name}-{time.strftime('%Y%m%d-%H%M%S')}"
            result[work.name] = measure(work, args.traces, model, folder)
            write_whole(args.out / "serve.json", json.dumps(result, indent=2) + "\n")
    except (OSError, ValueError) as error:
        sys.exit(f"bench-serve: {error}")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
