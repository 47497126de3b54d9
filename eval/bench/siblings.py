# SPDX-License-Identifier: Apache-2.0
"""``make bench-siblings``: several samples of one prompt, stock SGLang and ours in turns.

For each n the small reasoner draws n samples of every problem at temperature 0.8, on equal pools: stock,
sharing within responses, and across. Writes ``siblings.json``, and a run folder for each n."""

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval import command
from eval.bench import sides
from eval.command import option
from eval.methods import DENSE
from eval.runs.folder import Cell, Result, write_json
from eval.small_reasoner import MODEL

WITHIN, ACROSS = "newest", "newest:scope=prompt"


@dataclass(frozen=True)
class Options:
    counts: tuple[int, ...] = option((1, 4, 16), "samples of a problem", least=1, metavar="N")
    problems: int = option(100, "of each n", least=1, metavar="N")
    rounds: int = option(1, "turns of each server", least=1, metavar="N")
    kv_budget: int = option(12_000, "KV slots", least=1, metavar="SLOTS")
    out: Path = option(Path("build/bench"), "folder of results")


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


def row_of(cells: Sequence[Cell], stock: Sequence[Cell]) -> dict[str, Any]:
    """``saved_across``: slots that another response to the prompt lends, over positions. Majorities
    are over the samples of a problem in all rounds."""
    totals = [one for cell in cells for one in cell.served().totals()]
    across = [one["memory_saving_ratio"] * one["across_ratio"] for one in totals]
    ours, dense = (
        majority(row for cell in side for row in cell.results()) for side in (cells, stock)
    )
    return {
        **sides.row_of(cells, stock),
        "saved_across": statistics.mean(across) if across else None,
        "majority": ours,
        "dense_majority": dense,
    }


def work(options: Options) -> None:
    asked: dict[str, Any] = {"model": str(MODEL), "kv_budget": options.kv_budget}
    asked |= {"server_flags": sides.SERVER_FLAGS, "temperature": 0.8, "warm_up": 4}
    found: dict[str, Any] = {}
    for count in options.counts:
        out = sides.fresh(options.out / "siblings", f"x{count}")
        task, limit = f"small_reasoner_x{count}", options.problems * count
        methods = DENSE, WITHIN, ACROSS
        cells = sides.in_turns(task, methods, options.rounds, out, limit=limit, **asked)
        found[str(count)] = {name: row_of(cells[name], cells[DENSE]) for name in methods[1:]}
        write_json(options.out / "siblings.json", found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    command.run(Options, work)
