# SPDX-License-Identifier: Apache-2.0
"""How much random sharing it takes to save as much as a method does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.runs.folder import Cell, RunError

#: Relative difference between two savings that counts as equal.
TOLERANCE = 0.05
#: Problems of a pilot.
PILOT_PROBLEMS = 24
_MOST_PILOTS = 3
# The embedded model saved 31% at a ratio of 0.4: the first step of a response has no
# earlier one, and an unfinished last step is never compared.
_FIRST_FACTOR = 1.3
_LEAST_RATIO = 0.01


class NothingToMatch(RunError):
    """A method saved nothing, so no random sharing saves as much."""


def match(target: float, pilot: Callable[[float], float]) -> dict[str, Any]:
    """Find the ratio whose saving is ``target``, by pilots and the rule of three. Savings are final
    ones, 0 to 1. Returns ``ratio``, ``target``, and ``pilots``: ratio and saving of each, in
    order."""
    ratio = _bounded(target * _FIRST_FACTOR)
    pilots: list[tuple[float, float]] = []
    for _ in range(_MOST_PILOTS):
        saving = pilot(ratio)
        pilots.append((ratio, saving))
        if abs(saving - target) <= TOLERANCE * target:
            break
        rescaled = _bounded(ratio * target / saving if saving > 0 else 2 * ratio)
        if rescaled == ratio:
            break
        ratio = rescaled
    return {"ratio": ratio, "target": target, "pilots": [list(one) for one in pilots]}


def final_saving(cells: Sequence[Cell]) -> float | None:
    """Saving at the end of a response over all legs of some cells; None if no leg has told."""
    totals = [leg.report.get("totals", {}) for cell in cells for leg in cell.legs()]
    counts = [one.get("requests_finished", 0) for one in totals]
    saved = [one.get("final_saving_ratio", 0.0) for one in totals]
    whole = sum(counts)
    return sum(s * n for s, n in zip(saved, counts, strict=True)) / whole if whole else None


def _bounded(ratio: float) -> float:
    return min(1.0, max(_LEAST_RATIO, round(ratio, 4)))
