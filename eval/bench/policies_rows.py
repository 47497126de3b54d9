# SPDX-License-Identifier: Apache-2.0
"""Rows of ``build/bench/policies.json``: a policy at one setting, against dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.bench.policies_accuracy import DENSE, Runs
from eval.bench.policies_points import SELECTOR, Point
from eval.bench.policies_speed import Timing
from eval.measures.accuracy import accuracy, compare, keyed
from eval.measures.figures import of_cells
from eval.runs.folder import Cell

#: A policy and the saving that it aims at.
Aim = tuple[str, float]


def row_of(point: Point, runs: Runs, timed: Timing | None) -> dict[str, Any]:
    """One row. Shares are of 1; what was not measured is None.

    ``saved`` is what the server counted, averaged over decode steps: slots that the running
    requests did without over their positions, which is what dense holds. ``accuracy_error``
    is half of the 95% interval of the difference from dense on the same problems.
    ``throughput_ratio``, ``step_ms`` and others come from replays of the policy at this aim.
    """
    cell, dense = runs.cell(point.method), runs.cell(DENSE)
    held = of_cells([cell])
    results = keyed({cell.seed: cell.results()})
    against = compare(results, keyed({dense.seed: dense.results()}))
    scored = accuracy(results)
    return {
        "policy": point.policy,
        "aim": point.aim,
        "method": point.method,
        "saved": held.saving,
        "saved_at_the_end": held.final_saving,
        "reads_saved": _reads_saved(cell, point.policy),
        "accuracy": scored.value if scored else None,
        "accuracy_difference": against.difference.value if against else None,
        "accuracy_error": _half(against.difference.low, against.difference.high)
        if against
        else None,
        "only_dense_right": against.only_dense if against else None,
        "only_policy_right": against.only_method if against else None,
        "problems": len(results),
        "length_ratio": _length_ratio(cell, dense),
        "leaked_slots": held.leaked_slots,
        "throughput_ratio": timed.throughput_ratio if timed else None,
        "throughput_ratios": timed.throughput_ratios if timed else None,
        "throughput_saved": timed.saved if timed else None,
        "step_ms": timed.step_ms if timed else None,
        "dense_step_ms": timed.dense_step_ms if timed else None,
        "scheduler_ms": timed.scheduler_ms if timed else None,
        "mean_running": timed.mean_running if timed else None,
        "dense_mean_running": timed.dense_mean_running if timed else None,
        "reproduced": timed.reproduced if timed else None,
    }


def rows(
    points: Sequence[Point], runs: Runs, timings: Mapping[Aim, Timing]
) -> list[dict[str, Any]]:
    """Rows of the points that have answers."""
    return [
        row_of(point, runs, timings.get((point.policy, point.aim)))
        for point in points
        if runs.cell(point.method).results()
    ]


def dense_row(runs: Runs) -> dict[str, Any]:
    """What the rows are held against."""
    cell = runs.cell(DENSE)
    scored = accuracy(keyed({cell.seed: cell.results()}))
    return {
        "accuracy": scored.value if scored else None,
        "accuracy_error": _half(scored.low, scored.high) if scored else None,
        "problems": scored.n if scored else 0,
    }


def _reads_saved(cell: Cell, policy: str) -> float | None:
    """The share of positions that attention did not read, in layers that select; None of policies
    that drop or share."""
    if SELECTOR not in policy.split("+"):
        return None
    counts = [leg.report.get("selection") or {} for leg in cell.legs()]
    held = sum(int(count.get("positions_held", 0)) for count in counts)
    return 1 - sum(int(count.get("positions_read", 0)) for count in counts) / held if held else None


def _half(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else (high - low) / 2


def _length_ratio(cell: Cell, dense: Cell) -> float | None:
    """Output tokens over dense's on the same problems."""
    one, other = cell.answered(), dense.answered()
    both = one.keys() & other.keys()
    base = sum(other[name].output_tokens for name in both)
    return sum(one[name].output_tokens for name in both) / base if base else None
