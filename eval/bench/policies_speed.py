# SPDX-License-Identifier: Apache-2.0
"""Throughput and step time of policies on replayed responses, in turns with stock SGLang."""

import itertools
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.bench.policies_points import Point, flags_of
from eval.bench.serve import SERVER_FLAGS, run_in_turns
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.runs.folder import Cell
from eval.runs.records import Moment

TASK = "aime24_replay"
#: Tokens of the pieces of responses: of unlike lengths, so that requests do not run in waves.
PIECES = (1000, 1300, 1600)
LIMIT = 8
#: Two or three requests of a stock server: memory must decide how many run.
KV_BUDGET = 2700
_FLAGS = ("--attention-backend", "reasoncache_cpu", *SERVER_FLAGS)
#: A stock server beside them: each holds up to 3 GB.
_TOGETHER = 3
#: Log lines at a batch size, of either server, below which it is not compared.
_LEAST_LINES = 5

#: What :func:`timing` says of a policy against stock; fields as in docs/evaluation.md.
Timing = dict[str, Any]


def groups(points: Sequence[Point]) -> list[list[Point]]:
    """Points that take turns with one stock server: few at a time, and of the same flags."""
    alike: dict[tuple[str, ...], list[Point]] = {}
    for point in sorted(points, key=lambda point: flags_of(point.method)):
        alike.setdefault(flags_of(point.method), []).append(point)
    return [g[at : at + _TOGETHER] for g in alike.values() for at in range(0, len(g), _TOGETHER)]


def measure(
    points: Sequence[Point], records_path: Path, model: str, rounds: int, home: Path
) -> dict[str, Timing]:
    """Run one group, or go on with it; by policy, without those that could not be measured."""
    methods = [DENSE, *(point.method for point in points)]
    folder = home / ",".join(point.policy for point in points)
    for method, seed in itertools.product(methods, range(rounds)):
        _forget_half(Cell(folder, TASK, method, seed))
    cells = run_in_turns(
        TASK,
        methods,
        rounds,
        folder,
        model=model,
        limit=LIMIT,
        data={TASK: str(records_path)},
        temperature=0.0,
        kv_budget=KV_BUDGET,
        warm_up=2,
        # Of steps between two lines of a server's log: batches last some hundred.
        decode_log_interval=4,
        server_flags=(*_FLAGS, *flags_of(points[0].method)),
    )
    found = {point.policy: timing(cells[point.method], cells[DENSE]) for point in points}
    return {policy: one for policy, one in found.items() if one is not None}


def timing(cells: Sequence[Cell], dense: Sequence[Cell]) -> Timing | None:
    """Sum rounds up, those that both have measured in one go; None without any.

    ``throughput_ratio`` is the median of rounds; steps are None if the two have too few batches
    in common; ``reproduced`` is the share of responses that came back word for word.
    """
    rates = [(_rate(one), _rate(other)) for one, other in zip(cells, dense, strict=True)]
    ratios = [one / other for one, other in rates if one and other]
    if not ratios:
        return None
    totals = pd.DataFrame([leg.report.get("totals", {}) for c in cells for leg in c.legs()])
    spent, steps = totals.reindex(columns=["scheduler_seconds", "decode_steps"]).sum()
    timelines = ([m for cell in side for m in cell.timeline()] for side in (cells, dense))
    step_ms, dense_step_ms = matched_step_ms(*timelines) or (None, None)
    seen = of_cells(cells)
    graded = [row.correct for cell in cells for row in cell.results()]
    return {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "step_ms": step_ms,
        "dense_step_ms": dense_step_ms,
        "scheduler_ms": 1e3 * float(spent / steps) if steps else None,
        "saved": seen.saving,
        "mean_running": seen.mean_running,
        "dense_mean_running": of_cells(dense).mean_running,
        "retractions": seen.retractions,
        "leaked_slots": seen.leaked_slots,
        "reproduced": sum(graded) / len(graded) if graded else None,
    }


def matched_step_ms(mine: Sequence[Moment], theirs: Sequence[Moment]) -> tuple[float, float] | None:
    """Milliseconds of a decode step of two servers, over the batch sizes that both ran: medians at
    each size (a batch may change between two log lines), weighed by the lines that both have."""
    sides = []
    for side in (mine, theirs):
        seen = [(m.running, 1e3 * m.running / m.tokens_per_s) for m in side if m.tokens_per_s]
        frame = pd.DataFrame([row for row in seen if row[0]], columns=["running", "ms"])
        sides.append(frame.groupby("running")["ms"].agg(ms="median", lines="size"))
    both = sides[0].join(sides[1], how="inner", rsuffix="_other")
    both = both.assign(weight=both[["lines", "lines_other"]].min(axis=1))
    both = both[both["weight"] >= _LEAST_LINES]
    if both.empty:
        return None
    means = both[["ms", "ms_other"]].mul(both["weight"], axis=0).sum() / both["weight"].sum()
    return float(means["ms"]), float(means["ms_other"])


def _rate(cell: Cell) -> float | None:
    return of_cells([cell]).tokens_per_s


def _forget_half(cell: Cell) -> None:
    """Delete a cell that was stopped half-way; gone on with it would have no throughput."""
    if cell.folder.is_dir() and (len(cell.answered()) < LIMIT or _rate(cell) is None):
        shutil.rmtree(cell.folder)
