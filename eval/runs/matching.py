# SPDX-License-Identifier: Apache-2.0
"""How much random sharing it takes to save as much as a method does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Matched:
    """A random ratio and how it was found.

    Attributes:
        ratio: ``--reasoncache-random-ratio``.
        target: final saving ratio to reach.
        pilots: ratio and saving of each pilot, in order.
    """

    ratio: float
    target: float
    pilots: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "target": self.target,
            "pilots": [list(pilot) for pilot in self.pilots],
        }


def match(target: float, pilot: Callable[[float], float]) -> Matched:
    """Find the ratio whose saving is ``target``, by pilots and the rule of three.

    Args:
        target: final saving ratio to reach, 0 to 1.
        pilot: measures the saving at a ratio.
    """
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
    return Matched(ratio, target, tuple(pilots))


def final_saving(cells: Sequence[Cell]) -> float | None:
    """Saving at the end of a response over all legs of some cells; None if no leg has told."""
    saved = requests = 0.0
    for cell in cells:
        for leg in cell.legs():
            totals = leg.report.get("totals", {})
            count = totals.get("requests_finished", 0)
            requests += count
            saved += totals.get("final_saving_ratio", 0.0) * count
    return saved / requests if requests else None


def _bounded(ratio: float) -> float:
    return min(1.0, max(_LEAST_RATIO, round(ratio, 4)))
