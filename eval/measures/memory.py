# SPDX-License-Identifier: Apache-2.0
"""KV memory of one cell: what sharing saved, and what was in use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.runs.records import Leg, Moment

_FLAG = "--enable-reasoncache"


@dataclass(frozen=True)
class Memory:
    """None where the records do not tell.

    Attributes:
        saving: slots saved over positions held by running requests, averaged over
            decode steps.
        final_saving: the same at the end of a response, averaged over responses.
        affected: tokens touched by sharing over all tokens.
        peak_slots, mean_slots: KV slots in use, over logged decode steps.
        mean_saved: slots saved, over the same.
        retractions: requests thrown out of a batch and recomputed.
        leaked_slots: slots in use after the last response and a flush, of all legs.
    """

    saving: float | None
    final_saving: float | None
    affected: float | None
    peak_slots: int | None
    mean_slots: float | None
    mean_saved: float | None
    retractions: int | None
    leaked_slots: int | None


@dataclass(frozen=True)
class Curve:
    """Means over stretches of decode steps; all of one length.

    Attributes:
        step: middle of each stretch, in logged decode steps.
        used, saved: KV slots.
        running: requests in the batch.
    """

    step: list[float]
    used: list[float]
    saved: list[float]
    running: list[float]


def memory(legs: Sequence[Leg], timeline: Sequence[Moment]) -> Memory:
    """Legs weigh by what their server counted: looks, finished requests, their positions."""
    leaks = [leg.leaked_slots for leg in legs if leg.leaked_slots is not None]
    return Memory(
        saving=_ratio(legs, "memory_saving_ratio", "looks"),
        final_saving=_ratio(legs, "final_saving_ratio", "requests_finished"),
        affected=_ratio(legs, "affected_ratio", "finished_positions"),
        peak_slots=max(m.used for m in timeline) if timeline else None,
        mean_slots=float(np.mean([m.used for m in timeline])) if timeline else None,
        mean_saved=float(np.mean([m.saved for m in timeline])) if timeline else None,
        retractions=sum(leg.retractions for leg in legs) if legs else None,
        leaked_slots=sum(leaks) if leaks else None,
    )


def over_time(timeline: Sequence[Moment], points: int = 300) -> Curve | None:
    """The timeline in at most ``points`` stretches, legs one after the other; None if empty."""
    if not timeline:
        return None
    rows = np.array([(m.used, m.saved, m.running) for m in timeline], float)
    stretches = np.array_split(np.arange(len(rows)), min(points, len(rows)))
    used, saved, running = (
        [float(rows[at, column].mean()) for at in stretches] for column in range(3)
    )
    return Curve([float(at.mean()) for at in stretches], used, saved, running)


def _ratio(legs: Sequence[Leg], name: str, weight: str) -> float | None:
    """Weighted mean over legs; a stock server shares nothing, whose report is empty.

    None if a leg that answered something does not tell.
    """
    total = weights = 0.0
    for leg in legs:
        totals = leg.report.get("totals") if isinstance(leg.report, dict) else None
        if isinstance(totals, dict):
            value, heavy = _number(totals, name), _number(totals, weight) or 0.0
        elif leg.command and _FLAG not in leg.command:
            value, heavy = 0.0, float(leg.output_tokens)
        else:
            value, heavy = None, 0.0
        if value is None and not totals and not leg.responses:
            continue
        if value is None:
            return None
        total += heavy * value
        weights += heavy
    return total / weights if weights else None


def _number(totals: dict[str, Any], name: str) -> float | None:
    value = totals.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
