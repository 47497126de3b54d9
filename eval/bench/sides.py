# SPDX-License-Identifier: Apache-2.0
"""Stock SGLang against ours: methods take turns on the same problems; what their cells come to.

``bench-serve``, ``bench-siblings``, ``bench-short`` and ``bench-policies`` are workloads of this."""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.measures.accuracy import Estimate, accuracy, compare, keyed
from eval.measures.figures import matched_step_ms, of_cells
from eval.runs.folder import Cell, write_whole
from eval.runs.options import RunOptions
from eval.runs.work import run

#: The same for all, so that what differs is the memory: an admission that fills the pool.
#: SGLang's documentation advises 0.3 where requests wait beside free slots.
SERVER_FLAGS = ("--schedule-conservativeness", "0.3")
_COUNTS = ["decode_steps", "scheduler_seconds", "blocks_shared", "blocks_missed"]


def in_turns(
    task: str, methods: Sequence[str], rounds: int, out: Path, again: bool = False, **options: Any
) -> dict[str, list[Cell]]:
    """The cells of each method, one a round; the order turns round in every second one. Servers of
    all methods stay up; with ``again`` every round has the same problems and its own servers.
    ``options`` are those of :class:`RunOptions`."""
    asked: dict[str, Any] = {"tasks": (task,), "device": "cpu", **options}
    places = [(out / f"round-{number}", 0) if again else (out, number) for number in range(rounds)]
    if again:
        for number, (folder, _) in enumerate(places):
            turn = tuple(methods)[:: -1 if number % 2 else 1]
            run(RunOptions(methods=turn, **asked), folder)
    else:
        several: dict[str, Any] = {"seeds": tuple(range(rounds)), "keep_servers": len(methods)}
        run(RunOptions(methods=tuple(methods), **several, **asked), out)
    return {name: [Cell(folder, task, name, seed) for folder, seed in places] for name in methods}


def row_of(cells: Sequence[Cell], stock: Sequence[Cell]) -> dict[str, Any]:
    return {**answers_of(cells, stock), **speeds_of(cells, stock)}


def answers_of(cells: Sequence[Cell], stock: Sequence[Cell]) -> dict[str, Any]:
    """Answers and saved slots of one method, over all rounds; None: not known. Differences and
    ratios are over stock's on the same problems, ``accuracy_error`` half of the difference's 95%
    interval."""
    seen = of_cells(cells)
    mine, theirs = (
        keyed({number: cell.results() for number, cell in enumerate(side)})
        for side in (cells, stock)
    )
    right, against = accuracy(mine), compare(mine, theirs)
    difference = against.difference if against else None
    both = [(one.answered(), other.answered()) for one, other in zip(cells, stock, strict=True)]
    lengths = [
        (one[name].output_tokens, other[name].output_tokens)
        for one, other in both
        for name in one.keys() & other.keys()
    ]
    ours, whole = (sum(side) for side in zip(*lengths, strict=True)) if lengths else (0, 0)
    return {
        "saved": seen.saving,
        "saved_at_the_end": seen.final_saving,
        "accuracy": right.value if right else None,
        "accuracy_ratio": against.kept.value if against and against.kept else None,
        "accuracy_difference": difference.value if difference else None,
        "accuracy_error": half(difference),
        "only_dense_right": against.only_dense if against else None,
        "only_policy_right": against.only_method if against else None,
        "problems": len(mine),
        "length_ratio": ours / whole if whole else None,
        "leaked_slots": seen.leaked_slots,
        "failed_requests": seen.failed,
    }


def speeds_of(cells: Sequence[Cell], stock: Sequence[Cell]) -> dict[str, Any]:
    """Throughput and load of one method: medians over rounds, of ratios round by round, without
    rounds that were stopped half-way. ``step_ms`` and ``dense_step_ms`` are of decode steps at equal
    running requests, None if too few were."""
    rates = [[of_cells([cell]).tokens_per_s for cell in side] for side in (cells, stock)]
    ratios = [one / other for one, other in zip(*rates, strict=True) if one and other]
    known = [rate for rate in rates[0] if rate]
    counts = pd.DataFrame(totals_of(cells)).reindex(columns=_COUNTS).sum()
    seen, steps = of_cells(cells), counts["decode_steps"]
    timelines = ([m for cell in side for m in cell.timeline()] for side in (cells, stock))
    step_ms, dense_step_ms = matched_step_ms(*timelines) or (None, None)
    return {
        "tokens_per_s": statistics.median(known) if known else None,
        "tokens_per_s_all": rates[0],
        "throughput_ratio": statistics.median(ratios) if ratios else None,
        "throughput_ratios": ratios,
        "running": seen.mean_running,
        "dense_running": of_cells(stock).mean_running,
        "retractions": seen.retractions,
        "step_ms": step_ms,
        "dense_step_ms": dense_step_ms,
        "scheduler_ms": 1e3 * float(counts["scheduler_seconds"] / steps) if steps else None,
        "scheduler_seconds": float(counts["scheduler_seconds"]),
        "blocks_shared": int(counts["blocks_shared"]),
        "blocks_missed": int(counts["blocks_missed"]),
    }


def totals_of(cells: Sequence[Cell]) -> list[Mapping[str, Any]]:
    """What servers counted, a leg each, {} of stock ones."""
    return [leg.report.get("totals", {}) for cell in cells for leg in cell.legs()]


def half(found: Estimate | None) -> float | None:
    """Half of an interval's width."""
    if found is None or found.low is None or found.high is None:
        return None
    return (found.high - found.low) / 2


def fresh(home: Path, name: str) -> Path:
    """A run folder that no earlier call has used."""
    return home / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def keep(path: Path, found: Any) -> None:
    """Write what has been measured so far as JSON."""
    write_whole(path, json.dumps(found, indent=2) + "\n")
