# SPDX-License-Identifier: Apache-2.0
"""``make bench-short``: stock SGLang and ours, at once and when short, from ample memory to two requests.

For each pool the servers take turns on the same problems, greedy, sent at once. Writes ``short.json``,
and a run folder a pool."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.bench import at_least
from eval.bench.serve import SERVER_FLAGS, tokens_per_s
from eval.measures.accuracy import accuracy, keyed
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.runs.folder import Cell, RunError, write_whole
from eval.runs.options import RunOptions
from eval.runs.work import run
from eval.small_reasoner import MODEL

#: Side of a row -> its method.
SIDES = {"stock": DENSE, "always": "newest:when=always", "short": "newest"}


class Workload(NamedTuple):
    """``limit`` problems are sent at once; ``pools``: KV slots, from room for all to two requests."""

    task: str
    model: str
    limit: int
    pools: tuple[int, ...]


WORKLOADS = {
    "small_reasoner": Workload("small_reasoner", str(MODEL), 24, (30_000, 12_000, 6_000, 2_500)),
    "tiny_reasoner": Workload("tiny_reasoner", "tiny_reasoner", 48, (30_000, 12_000, 6_000, 1_500)),
}


def rounds_of(task: str, rounds: int, out: Path, **options: Any) -> dict[str, list[Cell]]:
    """The cells of each side, a round each; the same problems in all, so that stock's differences
    from round to round show. Sides take turns, in the opposite order in every second round."""
    several: dict[str, Any] = {"tasks": (task,), "seeds": (0,), "device": "cpu", **options}
    for number in range(rounds):
        methods = tuple(SIDES.values())[:: -1 if number % 2 else 1]
        run(RunOptions(methods=methods, **several), out / f"round-{number}")
    folders = [out / f"round-{number}" for number in range(rounds)]
    return {
        side: [Cell(folder, task, method, 0) for folder in folders]
        for side, method in SIDES.items()
    }


def texts(cell: Cell) -> dict[str, str]:
    return {response.problem_id: response.text for response in cell.responses()}


def row_of(pool: int, side: str, cells: Sequence[Cell], first: dict[str, str]) -> dict[str, Any]:
    """``first``: stock's texts in the first round, with which its own first round is not compared."""
    seen, again = of_cells(cells), cells[1:] if side == "stock" else cells
    same = [text == first.get(problem) for one in again for problem, text in texts(one).items()]
    right = accuracy(keyed({number: one.results() for number, one in enumerate(cells)}))
    totals = [leg.report.get("totals", {}) for cell in cells for leg in cell.legs()]
    speeds = [tokens_per_s(one) for one in cells]
    return {
        "pool": pool,
        "side": side,
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_all": speeds,
        "running": seen.mean_running,
        "retractions": seen.retractions,
        "as_stock": statistics.mean(same) if same else None,
        "accuracy": right.value if right else None,
        "saved": seen.saving or 0.0,
        "blocks_shared": sum(one.get("blocks_shared", 0) for one in totals),
        "blocks_missed": sum(one.get("blocks_missed", 0) for one in totals),
        "scheduler_seconds": sum(one.get("scheduler_seconds", 0.0) for one in totals),
        "leaked_slots": seen.leaked_slots,
        "failed_requests": seen.failed,
    }


def measure(work: Workload, pool: int, rounds: int, out: Path, flags: Sequence[str]) -> list[Any]:
    options: dict[str, Any] = {"limit": work.limit, "kv_budget": pool, "temperature": 0.0}
    options |= {"model": work.model, "server_flags": (*SERVER_FLAGS, *flags), "warm_up": 4}
    cells = rounds_of(work.task, rounds, out, **options)
    first = texts(cells["stock"][0])
    return [row_of(pool, side, row, first) for side, row in cells.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.short", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="default: all")
    add("--pools", type=at_least(1), nargs="+", metavar="SLOTS", help="instead of a workload's own")
    add("--limit", type=at_least(1), metavar="N", help="problems, instead of a workload's own")
    add("--rounds", type=at_least(2), default=2, metavar="N", help="turns of each server (2)")
    add("--running", type=at_least(1), metavar="N", help="--max-running-requests of each server")
    add("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args(argv)
    flags = () if args.running is None else ("--max-running-requests", str(args.running))
    rows: list[dict[str, Any]] = []
    try:
        for name in args.workloads:
            work = WORKLOADS[name]._replace(**({"limit": args.limit} if args.limit else {}))
            for pool in args.pools or work.pools:
                folder = args.out / "short" / f"{name}-{pool}-{time.strftime('%Y%m%d-%H%M%S')}"
                found = measure(work, pool, args.rounds, folder, flags)
                rows += [{"workload": name, **row} for row in found]
                write_whole(args.out / "short.json", json.dumps({"rows": rows}, indent=2) + "\n")
    except (OSError, ValueError, RunError) as error:
        sys.exit(f"bench-short: {error}")
    print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
