# SPDX-License-Identifier: Apache-2.0
"""Throughput and step time of policies on replayed responses, in turns with stock SGLang.

A few policies at a time stay up beside a stock server with the same flags and KV slots, and take
turns, in the opposite order in every second round.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eval.bench.policies_points import Point, flags_of
from eval.bench.serve import LOOPING, SERVER_FLAGS, refuse_a_half_empty_pool
from eval.measures.figures import of_cells
from eval.replay.pieces import write_pieces
from eval.runs.folder import Cell
from eval.runs.options import RunOptions
from eval.runs.records import Moment
from eval.runs.work import run
from eval.tasks.documents import replay
from eval.tokenizers import load_tokenizer

TASK = "aime24_replay"
TRACES = "aime24_sky_t1_32b.jsonl"
DENSE = "dense"
#: Tokens of the pieces that responses are cut into: of unlike lengths, so that requests do not
#: run in waves.
PIECES = (1000, 1300, 1600)
LIMIT = 8
#: Two or three requests of a stock server: memory must decide how many run.
KV_BUDGET = 2700
WARM_UP = 2
#: Of steps between two lines of a server's log: batches last some hundred.
LOG_INTERVAL = 4
FLAGS = ("--attention-backend", "reasoncache_cpu", *SERVER_FLAGS)
#: A stock server beside them: each holds up to 3 GB.
TOGETHER = 3
#: Log lines at a batch size, of either server, below which it is not compared.
_LEAST_LINES = 5


#: What :func:`timing` says of a policy against stock on the same responses.
Timing = dict[str, Any]


def groups(points: Sequence[Point]) -> list[list[Point]]:
    """Points that take turns with one stock server: few at a time, and of the same flags."""
    found: list[list[Point]] = []
    for point in sorted(points, key=lambda point: flags_of(point.method)):
        last = found[-1] if found else []
        if last and len(last) < TOGETHER and flags_of(last[0].method) == flags_of(point.method):
            last.append(point)
        else:
            found.append([point])
    return found


def write_records(traces: Path, model: str, path: Path) -> None:
    """The replayed responses as JSONL: pieces of those that are longest.

    Raises:
        OSError, ValueError: the file of traces is missing or bad.
        RunError: they would leave room for everyone.
    """
    whole = list(replay(str(traces / TRACES), model)["test"])
    write_pieces(whole, load_tokenizer(model), PIECES, LOOPING, path)
    refuse_a_half_empty_pool(path, model, LIMIT, KV_BUDGET)


def measure(
    points: Sequence[Point], records_path: Path, model: str, rounds: int, home: Path
) -> dict[str, Timing]:
    """Run one group, or go on with it; by policy, without those that could not be measured."""
    methods = [DENSE, *(point.method for point in points)]
    folder = home / ",".join(point.policy for point in points)
    for method in methods:
        for seed in range(rounds):
            _forget_half(Cell(folder, TASK, method, seed))
    options = RunOptions(
        model=model,
        tasks=(TASK,),
        methods=tuple(methods),
        seeds=tuple(range(rounds)),
        limit=LIMIT,
        data={TASK: str(records_path)},
        temperature=0.0,
        kv_budget=KV_BUDGET,
        device="cpu",
        warm_up=WARM_UP,
        decode_log_interval=LOG_INTERVAL,
        keep_servers=len(methods),
        server_flags=(*FLAGS, *flags_of(points[0].method)),
    )
    run(options, folder)
    cells = {m: [Cell(folder, TASK, m, seed) for seed in range(rounds)] for m in methods}
    found = {point.policy: timing(cells[point.method], cells[DENSE]) for point in points}
    return {policy: one for policy, one in found.items() if one is not None}


def timing(cells: Sequence[Cell], dense: Sequence[Cell]) -> Timing | None:
    """Sum rounds up, those that both have measured in one go; None without any.

    Returns:
        ``throughput_ratio``: output tokens/s over stock's, the median of ``throughput_ratios``.
        ``step_ms``, ``dense_step_ms``: of a decode step at the same numbers of running requests;
        None if they have too few in common.
        ``scheduler_ms``: of the scheduler's thread, spent on the policy in a decode step.
        ``saved``: slots over positions, averaged over decode steps, as the server counted.
        ``reproduced``: share of responses that came back word for word.
    """
    rates = [(_rate(one), _rate(other)) for one, other in zip(cells, dense, strict=True)]
    ratios = [one / other for one, other in rates if one and other]
    if not ratios:
        return None
    totals = [leg.report.get("totals", {}) for cell in cells for leg in cell.legs()]
    steps, spent = (
        sum(one.get(name, 0) for one in totals) for name in ("decode_steps", "scheduler_seconds")
    )
    mine, theirs = ([m for c in side for m in c.timeline()] for side in (cells, dense))
    step_ms, dense_step_ms = matched_step_ms(mine, theirs) or (None, None)
    seen = of_cells(cells)
    graded = [row.correct for cell in cells for row in cell.results()]
    return {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "step_ms": step_ms,
        "dense_step_ms": dense_step_ms,
        "scheduler_ms": 1e3 * spent / steps if steps else None,
        "saved": seen.saving,
        "mean_running": seen.mean_running,
        "dense_mean_running": of_cells(dense).mean_running,
        "retractions": seen.retractions,
        "leaked_slots": seen.leaked_slots,
        "reproduced": sum(graded) / len(graded) if graded else None,
    }


def matched_step_ms(mine: Sequence[Moment], theirs: Sequence[Moment]) -> tuple[float, float] | None:
    """Milliseconds of a decode step of two servers, over the batch sizes that both ran.

    The median at each size, weighed by the lines of the server that has fewer of it. A server
    logs tokens/s since its last line; where the batch changed in between, the median ignores it.
    """
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
    """Delete a cell that was stopped half-way: going on would leave it without a throughput."""
    if cell.folder.is_dir() and (len(cell.answered()) < LIMIT or _rate(cell) is None):
        shutil.rmtree(cell.folder)
