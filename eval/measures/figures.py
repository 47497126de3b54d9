# SPDX-License-Identifier: Apache-2.0
"""Speed and KV memory of one cell, or of several as if they were one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from eval.runs.folder import Cell, Leg, Moment, Response

_FLAG = "--enable-reasoncache"
#: Log lines at a batch size, of either server, below which it is not compared.
_LEAST_LINES = 5


@dataclass(frozen=True)
class Figures:
    """None where the records do not tell. Throughput is None where more than one leg answered, or
    the one that did was stopped: what it was generating took time and is counted nowhere."""

    tokens_per_s: float | None  # output tokens of complete responses
    problems_per_min: float | None  # complete responses
    ttft_p50: float | None  # seconds from sending a request to its first text
    ttft_p99: float | None
    tpot_p50: float | None  # seconds per output token after the first
    tpot_p99: float | None
    mean_running: float | None  # requests in the batch, averaged over logged decode steps
    resumed: bool  # whether throughput is None because the cell was stopped or resumed
    saving: float | None  # slots saved over positions of running requests, mean of decode steps
    final_saving: float | None  # the same at the end of a response, averaged over responses
    affected: float | None  # tokens touched by sharing over all tokens
    peak_slots: int | None  # KV slots in use, over logged decode steps
    mean_slots: float | None
    retractions: int | None  # requests thrown out of a batch and recomputed
    leaked_slots: int | None  # slots in use after the last response and a flush, of all legs
    response_tokens: float | None  # of complete responses, on average
    failed: int  # attempts that ended in an error


def of_cells(cells: Sequence[Cell]) -> Figures:
    """Read some cells; throughput is None of more than one."""
    found = figures(
        [row for cell in cells for row in cell.responses()],
        [leg for cell in cells for leg in cell.legs()],
        [moment for cell in cells for moment in cell.timeline()],
    )
    return found if len(cells) == 1 else replace(found, tokens_per_s=None, problems_per_min=None)


def figures(
    responses: Sequence[Response], legs: Sequence[Leg], timeline: Sequence[Moment]
) -> Figures:
    """Failed requests count in ``failed`` only. Legs weigh by what their server counted."""
    times = ("leg", "started", "first_token", "ended", "output_tokens")
    whole = [row for row in responses if row.error is None]
    complete = pd.DataFrame([{name: getattr(row, name) for name in times} for row in whole])
    answering = set(complete["leg"]) if len(complete) else set()
    only = next((leg for leg in legs if answering == {leg.leg}), None)
    timed = only if only and only.ended and only.seconds > 0 else None
    ttft = tpot = pd.Series(dtype=float)
    if len(complete):
        told = complete.dropna(subset="first_token").astype(float)
        ttft, later = told["first_token"] - told["started"], told[told["output_tokens"] > 1]
        tpot = (later["ended"] - later["first_token"]) / (later["output_tokens"] - 1)
    leaks = [leg.leaked_slots for leg in legs if leg.leaked_slots is not None]
    used = [moment.used for moment in timeline]
    names = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
    sides = ((times, share) for times in (ttft, tpot) for share in (0.5, 0.99))
    tails = [float(times.quantile(share)) if len(times) else None for times, share in sides]
    return Figures(
        tokens_per_s=timed.output_tokens / timed.seconds if timed else None,
        problems_per_min=60 * timed.responses / timed.seconds if timed else None,
        **dict(zip(names, tails, strict=True)),
        mean_running=float(np.mean([m.running for m in timeline])) if timeline else None,
        resumed=len(answering) > 1 or (only is not None and not only.ended),
        saving=_ratio(legs, "memory_saving_ratio", "polls"),
        final_saving=_ratio(legs, "final_saving_ratio", "requests_finished"),
        affected=_ratio(legs, "affected_ratio", "finished_positions"),
        peak_slots=max(used) if used else None,
        mean_slots=float(np.mean(used)) if used else None,
        retractions=sum(leg.retractions for leg in legs) if legs else None,
        leaked_slots=sum(leaks) if leaks else None,
        response_tokens=float(complete["output_tokens"].mean()) if len(complete) else None,
        failed=sum(row.error is not None for row in responses),
    )


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


def _ratio(legs: Sequence[Leg], name: str, weight: str) -> float | None:
    """Weighted mean over legs, 0 of a stock server's; None if a leg that answered does not tell."""
    total = weights = 0.0
    for leg in legs:
        totals = leg.report.get("totals") or {}
        value, heavy = totals.get(name), float(totals.get(weight) or 0.0)
        if not totals and leg.command and _FLAG not in leg.command:
            value, heavy = 0.0, float(leg.output_tokens)
        if value is None or not math.isfinite(value):
            if totals or leg.responses:
                return None
            continue
        total += heavy * value
        weights += heavy
    return total / weights if weights else None
