# SPDX-License-Identifier: Apache-2.0
"""Speed and KV memory of one cell, or of several as if they were one."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from eval.runs.folder import Cell, Moment, Response, Served

#: Log lines at a batch size, of either server, below which it is not compared.
_LEAST_LINES = 5
#: Ratio of a server's totals -> what it is an average over.
_WEIGHTS = {
    "memory_saving_ratio": "polls",
    "across_ratio": "polls",
    "final_saving_ratio": "requests_finished",
    "affected_ratio": "finished_positions",
}


@dataclass(frozen=True)
class Figures:
    """None where the records do not tell."""

    tokens_per_s: float | None  # output tokens of complete responses; None of several cells
    ttft_p50: float | None  # seconds from sending a request to its first text
    ttft_p99: float | None
    tpot_p50: float | None  # seconds per output token after the first
    tpot_p99: float | None
    mean_running: float | None  # requests in the batch, averaged over logged decode steps
    saving: float | None  # slots saved over positions of running requests, mean of decode steps
    final_saving: float | None  # the same at the end of a response, averaged over responses
    affected: float | None  # tokens touched by sharing over all tokens
    peak_slots: int | None  # KV slots in use, over logged decode steps
    mean_slots: float | None
    retractions: int  # requests thrown out of a batch and recomputed
    leaked_slots: int  # slots in use after the last response and a flush
    failed: int  # attempts that ended in an error


def of_cells(cells: Sequence[Cell]) -> Figures:
    """Figures of measured cells."""
    return figures(
        [row for cell in cells for row in cell.responses()],
        [cell.served() for cell in cells],
        [moment for cell in cells for moment in cell.timeline()],
    )


def figures(
    responses: Sequence[Response], served: Sequence[Served], timeline: Sequence[Moment]
) -> Figures:
    """Failed requests count in ``failed`` only. Ratios weigh by what schedulers counted."""
    whole = [row for row in responses if row.error is None]
    told = [row for row in whole if row.first_token is not None]
    ttft = pd.Series([row.first_token - row.started for row in told], dtype=float)  # type: ignore[operator]
    tpot = pd.Series(
        [
            (row.ended - row.first_token) / (row.output_tokens - 1)  # type: ignore[operator]
            for row in told
            if row.output_tokens > 1
        ],
        dtype=float,
    )
    used = pd.Series([moment.used for moment in timeline], dtype=float)
    running = pd.Series([moment.running for moment in timeline], dtype=float)
    (only,) = served if len(served) == 1 else (None,)
    timed = only if only is not None and only.seconds > 0 else None
    return Figures(
        tokens_per_s=timed.output_tokens / timed.seconds if timed else None,
        ttft_p50=_known(ttft.quantile(0.5)), ttft_p99=_known(ttft.quantile(0.99)),
        tpot_p50=_known(tpot.quantile(0.5)), tpot_p99=_known(tpot.quantile(0.99)),
        mean_running=_known(running.mean()), saving=ratio(served, "memory_saving_ratio"),
        final_saving=ratio(served, "final_saving_ratio"), affected=ratio(served, "affected_ratio"),
        peak_slots=int(used.max()) if len(used) else None, mean_slots=_known(used.mean()),
        retractions=sum(one.retractions for one in served),
        leaked_slots=sum(one.leaked_slots for one in served),
        failed=sum(row.error is not None for row in responses),
    )  # fmt: skip


def speeds_of(cells: Sequence[Cell], stock: Sequence[Cell]) -> dict[str, Any]:
    """Throughput and load of one method: medians over rounds, of ratios round by round. ``step_ms``
    and ``dense_step_ms`` are of decode steps at equal running requests, None if too few were;
    ``cpu_ratio`` is of CPU seconds a token of the schedulers and their processes."""
    mine, theirs = ([of_cells([cell]) for cell in side] for side in (cells, stock))
    pairs = list(zip(mine, theirs, strict=True))
    rates = [one.tokens_per_s for one in mine]
    ratios = [
        a.tokens_per_s / b.tokens_per_s for a, b in pairs if a.tokens_per_s and b.tokens_per_s
    ]
    cpu = [
        [one.cpu_seconds / max(one.output_tokens, 1) for one in (cell.served() for cell in side)]
        for side in (cells, stock)
    ]
    cpu_ratios = [one / other for one, other in zip(*cpu, strict=True) if other]
    timelines = ([m for cell in side for m in cell.timeline()] for side in (cells, stock))
    step_ms, dense_step_ms = matched_step_ms(*timelines) or (None, None)
    both, totals = of_cells(cells), [one for cell in cells for one in cell.served().totals()]
    steps, seconds, shared, missed = (
        sum(one.get(name, 0) for one in totals)
        for name in ("decode_steps", "scheduler_seconds", "blocks_shared", "blocks_missed")
    )
    return {
        "tokens_per_s": _median([rate for rate in rates if rate]),
        "tokens_per_s_all": rates,
        "throughput_ratio": _median(ratios),
        "throughput_ratios": ratios,
        "tpot_p99_ratio": _median(
            [a.tpot_p99 / b.tpot_p99 for a, b in pairs if a.tpot_p99 and b.tpot_p99]
        ),
        "cpu_ratio": _median(cpu_ratios),
        "running": both.mean_running,
        "dense_running": of_cells(stock).mean_running,
        "retractions": both.retractions,
        "step_ms": step_ms,
        "dense_step_ms": dense_step_ms,
        "scheduler_ms": 1e3 * seconds / steps if steps else None,
        "scheduler_seconds": seconds,
        "blocks_shared": shared,
        "blocks_missed": missed,
    }


def ratio(served: Sequence[Served], name: str) -> float | None:
    """Weighted mean of a ratio over all schedulers that share; 0 where none does, None where they do
    not tell."""
    totals = [one for cell in served for one in cell.totals()]
    if not totals:
        return 0.0
    known = [(one[name], one.get(_WEIGHTS[name], 0)) for one in totals if name in one]
    weight = sum(heavy for _, heavy in known)
    return sum(value * heavy for value, heavy in known) / weight if weight else None


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


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
