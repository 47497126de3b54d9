# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of one cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.runs.records import Leg, Moment, Response


@dataclass(frozen=True)
class Speed:
    """None where the records do not tell.

    Attributes:
        tokens_per_s: output tokens of complete responses per second. None where more than
            one leg answered, or the one that did was stopped: what it was generating when
            it ended took time and is counted nowhere.
        problems_per_min: complete responses per minute, in the same legs.
        ttft_p50, ttft_p99: seconds from sending a request to its first text.
        tpot_p50, tpot_p99: seconds per output token after the first.
        mean_running: requests in the batch, averaged over logged decode steps.
        seconds: of all legs.
        responses: complete ones.
        unrecorded: complete ones in legs that have no record (killed before their end);
            they count for latency, not for throughput.
        resumed: whether throughput is None because the cell was stopped or resumed.
    """

    tokens_per_s: float | None
    problems_per_min: float | None
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    tpot_p99: float | None
    mean_running: float | None
    seconds: float
    responses: int
    unrecorded: int
    resumed: bool


def speed(responses: Sequence[Response], legs: Sequence[Leg], timeline: Sequence[Moment]) -> Speed:
    """Failed requests count nowhere here."""
    complete = [row for row in responses if row.error is None]
    recorded = {leg.leg: leg for leg in legs}
    answering = {row.leg for row in complete}
    only = recorded.get(next(iter(answering))) if len(answering) == 1 else None
    whole = only if only is not None and only.ended and only.seconds > 0 else None
    first = [row.first_token - row.started for row in complete if row.first_token is not None]
    ttft_p50, ttft_p99 = _percentiles(first)
    tpot_p50, tpot_p99 = _percentiles([t for row in complete if (t := tpot(row)) is not None])
    return Speed(
        tokens_per_s=whole.output_tokens / whole.seconds if whole else None,
        problems_per_min=60 * whole.responses / whole.seconds if whole else None,
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        tpot_p50=tpot_p50,
        tpot_p99=tpot_p99,
        mean_running=float(np.mean([m.running for m in timeline])) if timeline else None,
        seconds=sum(leg.seconds for leg in legs),
        responses=len(complete),
        unrecorded=sum(row.leg not in recorded for row in complete),
        resumed=len(answering) > 1 or (only is not None and not only.ended),
    )


def tpot(response: Response) -> float | None:
    """Seconds per output token after the first; None for a response of one token or no text."""
    if response.first_token is None or response.output_tokens < 2:
        return None
    return (response.ended - response.first_token) / (response.output_tokens - 1)


def _percentiles(seconds: Sequence[float]) -> tuple[float | None, float | None]:
    if not seconds:
        return None, None
    p50, p99 = np.percentile(seconds, (50, 99))
    return float(p50), float(p99)
