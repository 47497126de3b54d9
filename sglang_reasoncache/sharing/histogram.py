# SPDX-License-Identifier: Apache-2.0
"""Logarithmic histogram of distances: a percentile in bounded memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_VERSION = 1
#: Smallest distance with a bin of its own, the end of the range, and bins per factor of ten.
_LAYOUT = [1e-7, 1e3, 256]
_LOW, _HIGH, _PER_DECADE = _LAYOUT

#: Upper edges of the bins: exact zeros; up to 1e-7; between 1e-7 and 1e3; what lies above counts
#: as 1e3. A distance counts as the edge of its bin: never below itself, at most
#: 10 ** (1 / 256) = 1.00904 times itself.
_EDGES = np.concatenate(
    [[0.0, _LOW], _LOW * 10.0 ** (np.arange(1, 10 * _PER_DECADE + 1) / _PER_DECADE), [_HIGH]]
)
_NUM_BINS = len(_EDGES)
#: Weights of later observations grow under decay; they are scaled down before they overflow.
_MAX_WEIGHT = 1e100


class Histogram:
    """Counts of distances in logarithmic bins, optionally forgetting.

    :meth:`percentile` is at least the exact one (linear interpolation between
    order statistics, numpy's default) and at most 0.91% above it, for distances
    of zero or in [1e-7, 1e3). Smaller ones count as 1e-7, larger as 1e3.

    Args:
        half_life: Observations after which one counts half, above 0; None: never.
        state: See :meth:`to_state`; the newest observation weighs 1 again.

    Attributes:
        num_observed: Distances, those of the state included.

    Raises:
        ValueError: what is wrong with the state.
    """

    def __init__(self, half_life: float | None = None, state: object | None = None) -> None:
        self._growth = 1.0 if half_life is None else 2.0 ** (1.0 / half_life)
        self._weight = 1.0  # of the next observation
        self._bins = np.zeros(_NUM_BINS)
        self.num_observed = 0
        if state is not None:
            self._restore(state)

    def observe(self, distance: float) -> None:
        """Take a distance into account; NaN, infinite and negative ones are ignored."""
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
        # A hair above, or sums of fractional weights would fall short of themselves.
        masses = np.array([lower, min(lower + 1.0, total)]) * newest * (1 + 1e-12)
        last_filled = np.searchsorted(cumulated, cumulated[-1])
        at = np.minimum(np.searchsorted(cumulated, masses, side="right"), last_filled)
        low, high = _EDGES[at].tolist()
        return float(low + (high - low) * (rank - lower))

    def to_state(self) -> dict[str, object]:
        """JSON values: layout, count and the bins that are not empty."""
        newest = self._weight / self._growth
        return {
            "version": _VERSION,
            "layout": _LAYOUT,
            "num_observed": self.num_observed,
            "bins": [[int(i), float(self._bins[i] / newest)] for i in np.flatnonzero(self._bins)],
        }

    def _restore(self, state: object) -> None:
        if not isinstance(state, dict):
            raise ValueError(f"histogram state must be an object, got {type(state).__name__}")
        for key, value in (("version", _VERSION), ("layout", _LAYOUT)):
            if state.get(key) != value:
                raise ValueError(
                    f"histogram state must have {key} {value}, got {state.get(key)!r:.80}"
                )
        self._restore_bins(state.get("bins"))
        count: Any = state.get("num_observed")
        total = float(self._bins.sum())
        # Decay only ever makes the weights smaller than the count.
        least = total * (1 - 1e-6)
        if not (type(count) is int and least <= count < 1 << 63 and (count > 0) == (total > 0)):
            raise ValueError(
                f"histogram num_observed must be an integer of at least the sum of weights "
                f"{total}, below 2**63, got {count!r:.80}"
            )
        self.num_observed = count
        self._weight = self._growth

    def _restore_bins(self, entries: object) -> None:
        try:
            if not isinstance(entries, list) or len(entries) > _NUM_BINS:
                raise ValueError
            for index, weight in entries:
                once = type(index) is int and 0 <= index < _NUM_BINS and not self._bins[index]
                if not once or type(weight) not in (int, float) or not 0 < weight <= _MAX_WEIGHT:
                    raise ValueError
                self._bins[index] = weight
        except (TypeError, ValueError):
            raise ValueError(
                f"histogram bins must be at most {_NUM_BINS} pairs [index, weight], an index below "
                f"that once, a weight in (0, {_MAX_WEIGHT}], got {entries!r:.80}"
            ) from None
