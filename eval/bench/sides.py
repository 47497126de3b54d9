# SPDX-License-Identifier: Apache-2.0
"""Stock SGLang against ours: methods take turns on the same problems; what their cells come to.

The benches of servers are workloads of this."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.measures.accuracy import accuracy, compare, keyed
from eval.measures.figures import of_cells, speeds_of
from eval.runs.folder import Cell
from eval.runs.options import RunOptions
from eval.runs.session import run

#: The same for all, so that what differs is the memory: an admission that fills the pool.
#: SGLang's documentation advises 0.3 where requests wait beside free slots.
SERVER_FLAGS = ("--schedule-conservativeness", "0.3")


def in_turns(
    task: str, methods: Sequence[str], rounds: int, out: Path, again: bool = False,
    **options: Any,
) -> dict[str, list[Cell]]:  # fmt: skip
    """The cells of each method, one a round; the order turns round in every second one. Servers of
    all methods stay up; with ``again`` every round has the same problems and its own servers.
    ``options`` are those of :class:`RunOptions`. Raises RunError: a cell could not be measured."""
    asked: dict[str, Any] = {"tasks": (task,), "device": "cpu", **options}
    places = [(out / f"round-{number}", 0) if again else (out, number) for number in range(rounds)]
    if again:
        for number, (folder, _) in enumerate(places):
            turn = tuple(methods)[:: -1 if number % 2 else 1]
            run(RunOptions(methods=turn, **asked), folder)
    else:
        asked = {"keep_servers": len(methods), **asked, "seeds": tuple(range(rounds))}
        run(RunOptions(methods=tuple(methods), **asked), out)
    return {
        name: [Cell(folder, task, name, seed).whole() for folder, seed in places]
        for name in methods
    }


def row_of(cells: Sequence[Cell], stock: Sequence[Cell]) -> dict[str, Any]:
    """Answers, saved slots and speed of one method, over all rounds; None: not known. Differences
    and ratios are over stock's on the same problems, ``accuracy_error`` half of the difference's 95%
    interval."""
    seen = of_cells(cells)
    mine, theirs = (
        keyed({number: cell.results() for number, cell in enumerate(side)})
        for side in (cells, stock)
    )
    right, against = accuracy(mine), compare(mine, theirs)
    both = [
        at for at in mine.keys() & theirs if mine[at].output_tokens and theirs[at].output_tokens
    ]
    tokens, dense = (sum(side[at].output_tokens for at in both) for side in (mine, theirs))
    difference = against.difference if against else None
    return {
        "saved": seen.saving,
        "saved_at_the_end": seen.final_saving,
        "accuracy": right.value if right else None,
        "accuracy_ratio": against.kept.value if against and against.kept else None,
        "accuracy_difference": difference.value if difference else None,
        "accuracy_error": difference.half_width if difference else None,
        "only_dense_right": against.only_dense if against else None,
        "only_policy_right": against.only_method if against else None,
        "problems": len(mine),
        "length_ratio": tokens / dense if dense else None,
        "leaked_slots": seen.leaked_slots,
        "failed_requests": seen.failed,
        **speeds_of(cells, stock),
    }


def fresh(home: Path, name: str) -> Path:
    """A run folder that no earlier call has used."""
    return home / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
