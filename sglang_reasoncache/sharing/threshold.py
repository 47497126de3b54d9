# SPDX-License-Identifier: Apache-2.0
"""Percentile-based adaptive threshold on block distances (ReasonCache, stage 2).

A block pair may share memory if its distance is at most the p-th percentile of
the distances observed so far, after a warm-up without sharing. The distances
live in a histogram of fixed size, so memory does not grow with the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.sharing.histogram import Histogram

Distances = Sequence[float] | npt.NDArray[np.floating]


class Threshold(Protocol):
    """What decides on a distance; smaller distances are closer blocks."""

    @property
    def num_observed(self) -> int:
        """Distances observed so far."""

    @property
    def is_warm(self) -> bool:
        """The warm-up is over."""

    def observe(self, distance: float) -> None:
        """Take a distance into account. NaN, infinite and negative ones are ignored."""

    def accepts(self, distance: float) -> bool:
        """Whether a pair at this distance may share; never for NaN or infinity."""

    def decide(self, distances: Distances) -> npt.NDArray[np.bool_]:
        """Observe all distances of a step, then say which are accepted."""


class AdaptiveThreshold:
    """Streaming p-th percentile with a warm-up; see :class:`Histogram` for its error.

    One object serves all requests of a model at one block size, because
    distances depend on both. Not thread safe.

    Args:
        percentile: p, 0 to 100. 0 accepts nothing; 100 accepts every finite
            distance after the warm-up.
        warmup: observed distances before anything is accepted.
        half_life: number of observations after which one counts half; None
            never forgets.

    Raises:
        ValueError: an argument out of its bound.
    """

    def __init__(
        self, percentile: float = 80.0, warmup: int = 128, half_life: float | None = None
    ) -> None:
        if not 0 <= percentile <= 100:
            raise ValueError(f"--reasoncache-percentile must be in [0, 100], got {percentile}")
        if warmup < 0:
            raise ValueError(f"--reasoncache-warmup must be at least 0, got {warmup}")
        self._percentile = percentile
        self._warmup = warmup
        self._histogram = Histogram(half_life)
        self._value: float | None = None

    @property
    def num_observed(self) -> int:
        """Distances observed, those of a restored state included."""
        return self._histogram.num_observed

    @property
    def is_warm(self) -> bool:
        return self.num_observed >= self._warmup

    @property
    def value(self) -> float:
        """Largest distance accepted now: negative for none, infinite for all."""
        if self._percentile <= 0 or not self.is_warm:
            return -1.0
        if self._percentile >= 100:
            return math.inf
        if self._value is None:
            # The scan over all bins is paid once for a run of decisions.
            self._value = self._histogram.percentile(self._percentile)
        return self._value

    def observe(self, distance: float) -> None:
        self._histogram.add(distance)
        self._value = None

    def accepts(self, distance: float) -> bool:
        return math.isfinite(distance) and 0 <= distance <= self.value

    def decide(self, distances: Distances) -> npt.NDArray[np.bool_]:
        return _decide(self, distances)

    def to_state(self) -> dict[str, object]:
        """The observed distribution as JSON values; the knobs are not part of it."""
        return self._histogram.to_state()

    @classmethod
    def from_state(
        cls,
        state: object,
        percentile: float = 80.0,
        warmup: int = 128,
        half_life: float | None = None,
    ) -> AdaptiveThreshold:
        """Restore a distribution under the given knobs.

        Raises:
            ValueError: a bad knob, or a state that is corrupt, of another
                version or of another bin layout; the message says which.
        """
        restored = cls(percentile, warmup, half_life)
        restored._histogram = Histogram.from_state(state, half_life)
        return restored


class FixedThreshold:
    """Accepts distances up to a constant; for ablations. No warm-up, no state.

    Raises:
        ValueError: a constant that is negative or not a number.
    """

    def __init__(self, value: float) -> None:
        if not value >= 0:
            raise ValueError(f"a fixed distance threshold must be at least 0, got {value}")
        self.value = value
        self._num_observed = 0

    @property
    def num_observed(self) -> int:
        return self._num_observed

    @property
    def is_warm(self) -> bool:
        return True

    def observe(self, distance: float) -> None:
        if math.isfinite(distance) and distance >= 0:
            self._num_observed += 1

    def accepts(self, distance: float) -> bool:
        return math.isfinite(distance) and 0 <= distance <= self.value

    def decide(self, distances: Distances) -> npt.NDArray[np.bool_]:
        return _decide(self, distances)


def _decide(threshold: Threshold, distances: Distances) -> npt.NDArray[np.bool_]:
    """Observe first: a step's own distances belong to the distribution."""
    values = [float(distance) for distance in distances]
    for value in values:
        threshold.observe(value)
    return np.array([threshold.accepts(value) for value in values], dtype=np.bool_)
