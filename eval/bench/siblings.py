# SPDX-License-Identifier: Apache-2.0
"""``make bench-siblings``: several samples of one prompt, stock SGLang and ours in turns.

For each n the small reasoner draws n samples of every problem at temperature 0.8, on equal pools: stock,
sharing within responses, and across. Writes ``siblings.json``, and a run folder for each n."""

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eval.bench import at_least
from eval.bench.serve import SERVER_FLAGS, run_in_turns, tokens_per_s
from eval.measures.accuracy import compare, keyed
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.runs.folder import Cell, Result, RunError, write_whole
from eval.small_reasoner import MODEL

WITHIN, ACROSS = "newest", "newest:scope=prompt"
_COUNTS = (1, 4, 16)


def measure(count: int, task: str, out: Path, *, problems: int, **options: Any) -> dict[str, Any]:
    """``count`` samples of each problem; ratios are ours over stock, round by round."""
    options |= {"limit": problems * count, "temperature": 0.8, "warm_up": 4}
    rounds = options.pop("rounds")
    methods = DENSE, WITHIN, ACROSS
    cells = run_in_turns(f"{task}_x{count}", methods, rounds, out, **options)
    return {method: row_of(cells[method], cells[DENSE]) for method in (WITHIN, ACROSS)}


def majority(results: Iterable[Result]) -> float:
    """Share of the problems, each asked several times, whose most frequent answer is right; of
    answers as frequent the first."""
    answers: defaultdict[str, Counter[str | None]] = defaultdict(Counter)
    right: dict[tuple[str, str | None], bool] = {}
    for row in results:
        problem = row.problem_id.rpartition(".")[0]
        answers[problem][row.extracted] += 1
        right[problem, row.extracted] = row.correct
    return statistics.mean(
        right[problem, given.most_common(1)[0][0]] for problem, given in answers.items()
    )


def row_of(cells: Sequence[Cell], dense: Sequence[Cell]) -> dict[str, Any]:
    """``saved``, ``saved_across``: slots over positions, means of decode steps; ``saved_at_the_end``:
    of responses. Majorities, ours and stock's, are over the samples of a problem in all rounds."""
    sides = [keyed({one.seed: one.results() for one in side}) for side in (cells, dense)]
    against, seen = compare(*sides), of_cells(cells)
    totals = [leg.report.get("totals", {}) for cell in cells for leg in cell.legs()]
    across = [one["memory_saving_ratio"] * one["across_ratio"] for one in totals if one]
    ratios = [
        tokens_per_s(one) / tokens_per_s(other) for one, other in zip(cells, dense, strict=True)
    ]
    return {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "saved": seen.saving,
        "saved_across": statistics.mean(across) if across else None,
        "saved_at_the_end": seen.final_saving,
        "accuracy_ratio": against.kept.value if against and against.kept else None,
        "majority": majority(sides[0].values()),
        "dense_majority": majority(sides[1].values()),
        "mean_running": seen.mean_running,
        "dense_mean_running": of_cells(dense).mean_running,
        "retractions": seen.retractions,
        "leaked_slots": seen.leaked_slots,
        "failed_requests": seen.failed,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.siblings", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--counts", type=at_least(1), nargs="+", default=_COUNTS, metavar="N", help="1 4 16")
    add("--problems", type=at_least(1), default=100, metavar="N", help="of each n (100)")
    add("--rounds", type=at_least(1), default=1, metavar="N", help="turns of each server (1)")
    add("--kv-budget", type=at_least(1), default=12_000, metavar="SLOTS", help="(12000)")
    add("--model", default=str(MODEL), help=f"({MODEL})")
    add("--task", default="small_reasoner", help="tiny_reasoner for --model tiny_reasoner")
    add("--out", type=Path, default=Path("build/bench"))
    args = parser.parse_args(argv)
    options = {"model": args.model, "kv_budget": args.kv_budget, "server_flags": SERVER_FLAGS}
    options |= {"rounds": args.rounds, "problems": args.problems}
    found: dict[str, Any] = {}
    try:
        for count in args.counts:
            folder = args.out / "siblings" / f"x{count}-{time.strftime('%Y%m%d-%H%M%S')}"
            found[str(count)] = measure(count, args.task, folder, **options)
            write_whole(args.out / "siblings.json", json.dumps(found, indent=2) + "\n")
    except (OSError, ValueError, RunError) as error:
        sys.exit(f"bench-siblings: {error}")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
