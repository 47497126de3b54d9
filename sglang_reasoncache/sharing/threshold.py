# SPDX-License-Identifier: Apache-2.0
"""Percentile-based adaptive threshold on block distances (ReasonCache, stage 2).

A block pair may share memory if its distance is at most the p-th percentile of
the distances observed so far, after a warm-up without sharing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.sharing.histogram import Histogram


class AdaptiveThreshold(Histogram):
    """Streaming p-th percentile with a warm-up; of one model and block size. Not thread safe.

    Args:
        percentile: p, 0 to 100. 0 accepts nothing; 100 accepts every finite
            distance after the warm-up.
        warmup: Observed distances before anything is accepted.
        half_life: See :class:`Histogram`, as for ``state``.
        state: Of an earlier run; the three above are not part of it.
    """

    def __init__(
        self,
        percentile: float = 80.0,
        warmup: int = 128,
        half_life: float | None = None,
        state: object | None = None,
    ) -> None:
        super().__init__(half_life, state)
        self._percentile = percentile
        self._warmup = warmup
        self._value: float | None = None

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
            self._value = self.percentile(self._percentile)
        return self._value

    def observe(self, distance: float) -> None:
        super().observe(distance)
        self._value = None

    def accepts(self, distance: float) -> bool:
        """Whether a pair at this distance may share; never for NaN or infinity."""
        return math.isfinite(distance) and 0 <= distance <= self.value

    def decide(self, distances: Iterable[float]) -> npt.NDArray[np.bool_]:
        """Observe all distances of a step, which belong to the distribution; then judge them."""
        values = [float(distance) for distance in distances]
        for value in values:
            self.observe(value)
        return np.array([self.accepts(value) for value in values], dtype=np.bool_)
