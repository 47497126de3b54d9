# SPDX-License-Identifier: Apache-2.0
"""``make bench-short``: stock SGLang and ours, at once and when short, from ample memory to two requests.

For each pool the servers take turns on the same problems, greedy, sent at once. Writes ``short.json``,
and a run folder a pool."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eval import command
from eval.bench import sides
from eval.command import option
from eval.methods import DENSE
from eval.runs.folder import Cell, write_json
from eval.small_reasoner import MODEL

#: Side of a row -> its method.
SIDES = {"stock": DENSE, "always": "newest:when=always", "short": "newest"}


class Workload(NamedTuple):
    """``limit`` problems are sent at once; ``pools``: KV slots, from room for all to two requests."""

    model: str
    limit: int
    pools: tuple[int, ...]


WORKLOADS = {
    "small_reasoner": Workload(str(MODEL), 24, (30_000, 12_000, 6_000, 2_500)),
    "tiny_reasoner": Workload("tiny_reasoner", 48, (30_000, 12_000, 6_000, 1_500)),
}


@dataclass(frozen=True)
class Options:
    workloads: tuple[str, ...] = option(tuple(WORKLOADS), "tasks", choices=WORKLOADS)
    pools: tuple[int, ...] = option((), "instead of a workload's own", least=1, metavar="SLOTS")
    limit: int | None = option(None, "problems, instead of a workload's own", least=1, metavar="N")
    rounds: int = option(2, "turns of each server", least=2, metavar="N")
    out: Path = option(Path("build/bench"), "folder of results")


def measure(task: str, pool: int, options: Options) -> list[dict[str, Any]]:
    """A row for each side; ``as_stock``: of its responses those that are stock's in the first round
    word for word, of stock those of later rounds."""
    work = WORKLOADS[task]
    asked: dict[str, Any] = {"limit": options.limit or work.limit, "kv_budget": pool, "warm_up": 4}
    asked |= {"model": work.model, "temperature": 0.0, "server_flags": sides.SERVER_FLAGS}
    out = sides.fresh(options.out / "short", f"{task}-{pool}")
    methods = tuple(SIDES.values())
    cells = sides.in_turns(task, methods, options.rounds, out, again=True, **asked)
    stock, rows = cells[DENSE], []
    for side, method in SIDES.items():
        row = sides.row_of(cells[method], stock)
        compared = cells[method][1:] if method == DENSE else cells[method]
        row |= {"as_stock": same_texts(compared, stock[0]), "saved": row["saved"] or 0.0}
        rows.append({"workload": task, "pool": pool, "side": side, **row})
    return rows


def same_texts(cells: Sequence[Cell], first: Cell) -> float | None:
    """The share of responses that are those of the cell ``first``."""
    known = {response.problem_id: response.text for response in first.responses()}
    found = [row.text == known.get(row.problem_id) for cell in cells for row in cell.responses()]
    return statistics.mean(found) if found else None


def work(options: Options) -> None:
    rows: list[dict[str, Any]] = []
    for task in options.workloads:
        for pool in options.pools or WORKLOADS[task].pools:
            rows += measure(task, pool, options)
            write_json(options.out / "short.json", {"rows": rows})
    print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    command.run(Options, work)
