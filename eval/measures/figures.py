# SPDX-License-Identifier: Apache-2.0
"""Speed and KV memory use in a cell. A cell is one method run on one task with one seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from eval.runs.folder import Cell, Moment, Response, Served

#: Maps each ratio in a scheduler's totals to the count that weights it in a mean over schedulers.
_WEIGHTS = {
    "memory_saving_ratio": "polls",
    "across_ratio": "polls",
    "final_saving_ratio": "requests_finished",
    "affected_ratio": "finished_positions",
}


@dataclass(frozen=True)
class Figures:
    """Figures of a cell. A figure is None if the cell's records do not suffice to compute it."""

    tokens_per_s: float | None  # output tokens of complete responses
    ttft_p50: float | None  # seconds from sending a request to its first text
    ttft_p99: float | None
    tpot_p50: float | None  # seconds per output token after the first
    tpot_p99: float | None
    cpu_per_token: float | None  # CPU seconds of schedulers and child processes per output token
    mean_running: float | None  # requests in the batch, averaged over logged decode steps
    #: The same over the steps at which other requests wait. The last responses of a burst do not count.
    running_while_waiting: float | None
    saving: float | None  # slots saved / positions in the batch, mean over every 4th decode step
    across: float | None  # share of the saved slots that comes from sharing with other requests
    final_saving: float | None  # slots saved / positions when a request ends, mean over requests
    affected: float | None  # share of finished requests' positions redirected or evicted
    peak_slots: int | None  # most KV slots in use at a logged decode step
    mean_slots: float | None
    retractions: int  # times that SGLang retracted a request, to compute it again later
    leaked_slots: int  # slots still in use after the last response and a cache flush
    missed: int  # blocks counted as shareable that could not share when slots ran short
    failed: int  # attempts to send a request that ended in an error


def of_cell(cell: Cell) -> Figures:
    """Figures of a measured cell."""
    return figures(cell.responses(), cell.served(), cell.timeline())


def figures(responses: Sequence[Response], served: Served, timeline: Sequence[Moment]) -> Figures:
    """Latencies and tokens omit failed requests. Ratios are means over schedulers, weighted by ``_WEIGHTS``."""
    whole = [row for row in responses if row.error is None]
    streamed = [(row, row.first_token) for row in whole if row.first_token is not None]
    ttft = pd.Series([first - row.started for row, first in streamed], dtype=float)
    later = [(row.ended - first, row.output_tokens - 1) for row, first in streamed]
    tpot = pd.Series([seconds / tokens for seconds, tokens in later if tokens > 0], dtype=float)
    used = pd.Series([moment.used for moment in timeline], dtype=float)
    running = pd.Series([moment.running for moment in timeline], dtype=float)
    waits = pd.Series([moment.queued > 0 for moment in timeline], dtype=bool)
    tokens = served.output_tokens
    return Figures(
        tokens_per_s=tokens / served.seconds if served.seconds > 0 else None,
        ttft_p50=_or_none(ttft.quantile(0.5)), ttft_p99=_or_none(ttft.quantile(0.99)),
        tpot_p50=_or_none(tpot.quantile(0.5)), tpot_p99=_or_none(tpot.quantile(0.99)),
        cpu_per_token=served.cpu_seconds / tokens if tokens else None,
        mean_running=_or_none(running.mean()),
        running_while_waiting=_or_none(running[waits].mean()), saving=ratio(served, "memory_saving_ratio"),
        across=ratio(served, "across_ratio"), final_saving=ratio(served, "final_saving_ratio"),
        affected=ratio(served, "affected_ratio"),
        peak_slots=int(used.max()) if len(used) else None, mean_slots=_or_none(used.mean()),
        retractions=served.retractions, leaked_slots=served.leaked_slots,
        missed=sum(scheduler.get("blocks_missed", 0) for scheduler in served.totals()),
        failed=sum(row.error is not None for row in responses),
    )  # fmt: skip


def ratio(served: Served, name: str) -> float | None:
    """Weighted mean of the ratio ``name`` over all schedulers; 0 for a stock server, None if unknown."""
    totals = served.totals()
    if not totals:
        return 0.0
    pairs = [
        (scheduler[name], scheduler.get(_WEIGHTS[name], 0))
        for scheduler in totals
        if name in scheduler
    ]
    weight = sum(heavy for _, heavy in pairs)
    return sum(value * heavy for value, heavy in pairs) / weight if weight else None


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
