# SPDX-License-Identifier: Apache-2.0
"""Logarithmic histogram of distances: a percentile in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_VERSION = 1
LOW = 1e-7
"""Smallest distance with a bin of its own; the range ends at :data:`HIGH`."""
HIGH = 1e3
BINS_PER_DECADE = 256
_NUM_INNER = BINS_PER_DECADE * 10
_LAYOUT = [LOW, HIGH, BINS_PER_DECADE]

#: Upper edges of the bins: exact zeros; up to LOW; between LOW and HIGH; what lies above counts
#: as HIGH. A distance counts as the edge of its bin: never below itself, at most
#: 10 ** (1 / 256) = 1.00904 times itself.
_EDGES = np.concatenate(
    [[0.0, LOW], LOW * 10.0 ** (np.arange(1, _NUM_INNER + 1) / BINS_PER_DECADE), [HIGH]]
)
_NUM_BINS = len(_EDGES)

# Weights of later observations grow under decay; scale down before they overflow.
_MAX_WEIGHT = 1e100


class Histogram:
    """Counts of distances in logarithmic bins, optionally forgetting.

    :meth:`percentile` is at least the exact one (linear interpolation between
    order statistics, numpy's default) and at most 0.91% above it, for distances
    of zero or in [1e-7, 1e3). Smaller ones count as 1e-7, larger as 1e3.

    Args:
        half_life: Observations after which one counts half, above 0; None: never.
    """

    def __init__(self, half_life: float | None = None) -> None:
        self._growth = 1.0 if half_life is None else 2.0 ** (1.0 / half_life)
        self._weight = 1.0  # of the next observation
        self._bins = np.zeros(_NUM_BINS)
        self.num_observed = 0

    def add(self, distance: float) -> None:
        """Observe a distance; NaN, infinite and negative ones are ignored."""
        if not (math.isfinite(distance) and distance >= 0):
            return
        self._bins[np.searchsorted(_EDGES[:-1], distance)] += self._weight
        self.num_observed += 1
        self._weight *= self._growth
        if self._weight > _MAX_WEIGHT:
            self._bins /= self._weight
            self._weight = 1.0

    def percentile(self, p: float) -> float:
        """The p-th percentile, p in [0, 100]; negative when nothing was observed."""
        cumulated = np.cumsum(self._bins)
        # In units of the newest observation; without decay, its count.
        newest = self._weight / self._growth
        total = float(cumulated[-1]) / newest
        if not total > 0:
            return -1.0
        rank = max(0.0, (total - 1.0) * p / 100.0)
        lower = math.floor(rank)
        low = self._order_statistic(cumulated, lower * newest)
        high = self._order_statistic(cumulated, min(lower + 1.0, total) * newest)
        return low + (high - low) * (rank - lower)

    @staticmethod
    def _order_statistic(cumulated: npt.NDArray[np.float64], mass: float) -> float:
        """Edge of the first bin with more than ``mass`` at or below it."""
        # A hair above, or sums of fractional weights would fall short of themselves.
        at = int(np.searchsorted(cumulated, mass * (1 + 1e-12), side="right"))
        last_filled = int(np.searchsorted(cumulated, cumulated[-1]))
        return float(_EDGES[min(at, last_filled)])

    def to_state(self) -> dict[str, object]:
        """JSON values: layout, count and the bins that are not empty."""
        newest = self._weight / self._growth
        filled = np.flatnonzero(self._bins)
        return {
            "version": _VERSION,
            "layout": _LAYOUT,
            "num_observed": self.num_observed,
            "bins": [[int(i), float(self._bins[i] / newest)] for i in filled],
        }

    @classmethod
    def from_state(cls, state: object, half_life: float | None = None) -> Histogram:
        """Restore :meth:`to_state`; the newest observation weighs 1 again.

        Raises:
            ValueError: what is wrong with the state.
        """
        if not isinstance(state, dict):
            raise ValueError(f"histogram state must be an object, got {type(state).__name__}")
        for key, value in (("version", _VERSION), ("layout", _LAYOUT)):
            if state.get(key) != value:
                raise ValueError(
                    f"histogram state must have {key} {value}, got {state.get(key)!r:.80}"
                )
        restored = cls(half_life)
        restored._bins = _read_bins(state.get("bins"))
        restored.num_observed = _read_count(state.get("num_observed"), restored._bins)
        restored._weight = restored._growth
        return restored


def _read_bins(entries: object) -> npt.NDArray[np.float64]:
    bins = np.zeros(_NUM_BINS)
    try:
        if not isinstance(entries, list) or len(entries) > _NUM_BINS:
            raise ValueError
        for index, weight in entries:
            once = type(index) is int and 0 <= index < _NUM_BINS and not bins[index]
            if not once or type(weight) not in (int, float) or not 0 < weight <= _MAX_WEIGHT:
                raise ValueError
            bins[index] = weight
    except (TypeError, ValueError):
        raise ValueError(
            f"histogram bins must be at most {_NUM_BINS} pairs [index, weight], an index below "
            f"that once, a weight in (0, {_MAX_WEIGHT}], got {entries!r:.80}"
        ) from None
    return bins


def _read_count(count: Any, bins: npt.NDArray[np.float64]) -> int:
    """Validate the count; decay only ever makes the weights smaller than it."""
    total = float(bins.sum())
    valid = type(count) is int and total <= count * (1 + 1e-6) and (count > 0) == (total > 0)
    if not valid:
        raise ValueError(
            f"histogram num_observed must be an integer of at least the sum of weights "
            f"{total}, got {count!r:.80}"
        )
    return int(count)
