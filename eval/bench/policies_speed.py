# SPDX-License-Identifier: Apache-2.0
"""Throughput and step time of policies on replayed responses, in turns with stock SGLang.

A few policies at a time stay up beside a stock server with the same flags and KV slots, and take
turns, in the opposite order in every second round.
"""

from __future__ import annotations

import collections
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.bench.policies_points import Point, flags_of
from eval.bench.quartiles import Quartiles
from eval.bench.serve import LEAST_CROWDING, LOOPING, SERVER_FLAGS, crowding
from eval.measures.memory import memory
from eval.measures.speed import speed
from eval.replay.pieces import cut
from eval.runs.folder import Cell, RunError, write_whole
from eval.runs.options import make_options
from eval.runs.records import Moment
from eval.runs.work import run
from eval.tasks.registry import find_task
from eval.tasks.task import Problem, Source
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


@dataclass(frozen=True)
class Timing:
    """A policy against stock on the same responses.

    Attributes:
        throughput_ratio: output tokens/s over stock's, the median of rounds.
        throughput_ratios: round by round.
        step_ms, dense_step_ms: time of a decode step at the same numbers of running requests;
            None if they have too few in common.
        scheduler_ms: time of the scheduler's thread spent on the policy, a decode step.
        saved: slots over positions, averaged over decode steps, as the server counted.
        mean_running: requests in the batch.
        dense_mean_running: of stock.
        retractions: over all rounds.
        leaked_slots: after the last response, of all rounds.
        reproduced: share of responses that came back word for word.
    """

    throughput_ratio: float
    throughput_ratios: list[float]
    step_ms: float | None
    dense_step_ms: float | None
    scheduler_ms: float | None
    saved: float | None
    mean_running: float | None
    dense_mean_running: float | None
    retractions: int | None
    leaked_slots: int | None
    reproduced: float | None

    @property
    def ratio_text(self) -> str:
        return Quartiles.of(self.throughput_ratios).text(2)


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
        TaskError: the file of traces is missing or bad.
        RunError: they would leave room for everyone.
    """
    task = find_task(TASK)
    whole = task.load(Source(path=traces / TRACES, model=model))
    long = [problem for problem in whole if (problem.max_tokens or 0) >= LOOPING]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in records(long, model)))
    chosen = task.load(Source(path=path, model=model, limit=LIMIT))
    crowded = crowding([p.max_tokens or 1 for p in chosen], KV_BUDGET)
    if crowded < LEAST_CROWDING:
        raise RunError(
            f"{path}: {KV_BUDGET} KV slots leave room for everyone "
            f"(crowding {crowded:.1f}, at least {LEAST_CROWDING})"
        )


def records(problems: Sequence[Problem], model: str) -> list[dict[str, str]]:
    """Responses in consecutive pieces of whole steps, each response in pieces of another length."""
    tokenizer = load_tokenizer(model)
    rows = []
    for number, problem in enumerate(problems):
        size = PIECES[number % len(PIECES)]
        for at, piece in enumerate(cut(problem.reference, tokenizer, size)):
            name = f"{problem.id}.{at}"
            rows.append({"id": name, "question": problem.prompt, "response": piece})
    return rows


def measure(
    points: Sequence[Point], records_path: Path, model: str, rounds: int, home: Path
) -> dict[str, Timing]:
    """Run one group, or go on with it; by policy, without those that could not be measured."""
    methods = [DENSE, *(point.method for point in points)]
    folder = home / ",".join(point.policy for point in points)
    for method in methods:
        for seed in range(rounds):
            _forget_half(Cell(folder, TASK, method, seed))
    values: dict[str, Any] = {
        "model": model,
        "tasks": [TASK],
        "methods": methods,
        "seeds": list(range(rounds)),
        "limit": LIMIT,
        "data": {TASK: str(records_path)},
        "temperature": 0.0,
        "kv_budget": KV_BUDGET,
        "device": "cpu",
        "warm_up": WARM_UP,
        "decode_log_interval": LOG_INTERVAL,
        "keep_servers": len(methods),
        "server_flags": [*FLAGS, *flags_of(points[0].method)],
    }
    run(make_options(values), folder)
    cells = {m: [Cell(folder, TASK, m, seed) for seed in range(rounds)] for m in methods}
    found = {point.policy: timing(cells[point.method], cells[DENSE]) for point in points}
    return {policy: one for policy, one in found.items() if one is not None}


def timing(cells: Sequence[Cell], dense: Sequence[Cell]) -> Timing | None:
    """Sum rounds up, those that both have measured in one go; None without any."""
    rates = [(_rate(one), _rate(other)) for one, other in zip(cells, dense, strict=True)]
    ratios = [one / other for one, other in rates if one and other]
    if not ratios:
        return None
    legs = [leg for cell in cells for leg in cell.legs()]
    mine, theirs = ([m for c in side for m in c.timeline()] for side in (cells, dense))
    held = memory(legs, mine)
    at_batch = matched_step_ms(mine, theirs)
    graded = [row for cell in cells for row in cell.results()]
    return Timing(
        throughput_ratio=statistics.median(ratios),
        throughput_ratios=ratios,
        step_ms=at_batch[0] if at_batch else None,
        dense_step_ms=at_batch[1] if at_batch else None,
        scheduler_ms=_scheduler_ms([leg.report.get("totals", {}) for leg in legs]),
        saved=held.saving,
        mean_running=speed([], [], mine).mean_running,
        dense_mean_running=speed([], [], theirs).mean_running,
        retractions=held.retractions,
        leaked_slots=held.leaked_slots,
        reproduced=sum(row.correct for row in graded) / len(graded) if graded else None,
    )


def matched_step_ms(mine: Sequence[Moment], theirs: Sequence[Moment]) -> tuple[float, float] | None:
    """Milliseconds of a decode step of two servers, over the batch sizes that both ran.

    The median at each size, weighed by the lines of the server that has fewer of it. A server
    logs tokens/s since its last line; where the batch changed in between, the median ignores it.
    """
    one, other = _by_size(mine), _by_size(theirs)
    weights = {
        size: min(len(one[size]), len(other[size]))
        for size in one.keys() & other.keys()
        if min(len(one[size]), len(other[size])) >= _LEAST_LINES
    }
    total = sum(weights.values())
    if not total:
        return None
    means = [
        sum(weight * statistics.median(side[size]) for size, weight in weights.items()) / total
        for side in (one, other)
    ]
    return means[0], means[1]


def _by_size(timeline: Sequence[Moment]) -> Mapping[int, list[float]]:
    found: dict[int, list[float]] = collections.defaultdict(list)
    for moment in timeline:
        if moment.running and moment.tokens_per_s:
            found[moment.running].append(1e3 * moment.running / moment.tokens_per_s)
    return found


def _scheduler_ms(totals: Sequence[Mapping[str, Any]]) -> float | None:
    steps = sum(one.get("decode_steps", 0) for one in totals)
    return 1e3 * sum(one.get("scheduler_seconds", 0.0) for one in totals) / steps if steps else None


def _rate(cell: Cell) -> float | None:
    return speed(cell.responses(), cell.legs(), cell.timeline()).tokens_per_s


def _forget_half(cell: Cell) -> None:
    """Delete a cell that was stopped half-way: going on would leave it without a throughput."""
    if cell.folder.is_dir() and (len(cell.answered()) < LIMIT or _rate(cell) is None):
        shutil.rmtree(cell.folder)
