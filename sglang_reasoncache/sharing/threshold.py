# SPDX-License-Identifier: Apache-2.0
"""Decides by their KV distances which block pairs may share."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.device.ranks import alike

_LOW = 1e-7
_HIGH = 1e3
_PER_DECADE = 256
#: Upper edges of the bins in the histogram of distances: 0, 1e-7, then 256 edges per factor of ten up to 1e3.
#: One more bin holds larger distances and counts them as 1e3. A distance in [1e-7, 1e3] counts as the upper
#: edge of its bin, which is at most 10 ** (1 / 256) = 1.00904 times the distance.
_EDGES = np.concatenate(
    [[0.0, _LOW], _LOW * 10.0 ** (np.arange(1, 10 * _PER_DECADE + 1) / _PER_DECADE), [_HIGH]]
)
_EDGES = np.array([alike(edge) for edge in _EDGES])
#: All counts of the histogram are halved when their sum exceeds this number. Recent distances then weigh more,
#: so the percentile follows the load of a server that runs for weeks.
_FULL = 2.0**21


class AdaptiveThreshold:
    """The adaptive threshold on KV distances (ReasonCache, stage 2): the p-th percentile of the distances seen.
    A pair may share if its distance is at most this percentile, which is computed from a histogram.

    If all distances are 0 or in [1e-7, 1e3], the threshold is at least the percentile that ``numpy.percentile``
    computes, and at most 0.91% above it. Once more than 2**21 distances were seen, older ones count less than
    newer ones. Not thread safe.

    Args:
        percentile: p, 0 to 100. With 0 no distance is accepted, with 100 every finite one after the warm-up.
        warmup: No distance is accepted before this many were seen.

    Attributes:
        num_observed: Number of distances seen since the start or the last :meth:`reset`.
        epoch: How often :meth:`reset` was called.
    """

    def __init__(self, percentile: float = 80.0, warmup: int = 128) -> None:
        self._percentile = percentile
        self._warmup = warmup
        self.epoch = -1
        self.reset()

    def reset(self) -> None:
        """Forget all distances. Called when SGLang flushes its cache, because the weights may have changed."""
        self._bins = np.zeros(len(_EDGES))
        self.num_observed = 0
        self.epoch += 1

    @property
    def is_warm(self) -> bool:
        return self.num_observed >= self._warmup

    @property
    def value(self) -> float:
        """The largest distance accepted now; negative if no distance is accepted, infinite if all are."""
        if self._percentile <= 0 or not self.is_warm:
            return -1.0
        return math.inf if self._percentile >= 100 else self._value()

    def decide(self, distances: Sequence[float]) -> npt.NDArray[np.bool_]:
        """Observe ``n`` distances, then judge them. Returns bool ``[n]``: for each, whether the pair may share.

        NaN, infinite and negative distances are neither observed nor accepted.
        """
        values = np.asarray(distances, dtype=np.float64)
        is_distance = np.isfinite(values) & (values >= 0)
        at = np.searchsorted(_EDGES[:-1], values[is_distance])
        self._bins += np.bincount(at, minlength=len(_EDGES))
        if self._bins.sum() > _FULL:
            self._bins /= 2
        self.num_observed += len(at)
        return is_distance & (values <= self.value)

    def describe(self) -> dict[str, Any]:
        """JSON for the endpoint. ``distance`` is :attr:`value`, or None if that is infinite."""
        value = self.value
        return {
            "percentile": self._percentile,
            "observations": self.num_observed,
            "warm": self.is_warm,
            "distance": value if math.isfinite(value) else None,
        }

    def _value(self) -> float:
        """The percentile, computed from the histogram; -1 if no distance was seen."""
        cumulated = np.cumsum(self._bins)
        if not cumulated[-1] > 0:
            return -1.0
        rank = max(0.0, (cumulated[-1] - 1.0) * self._percentile / 100.0)
        lower = math.floor(rank)
        # ``last`` is the last bin in use. After a single distance, the search for ``lower + 1`` ends beyond it.
        last = np.searchsorted(cumulated, cumulated[-1])
        at = np.minimum(np.searchsorted(cumulated, [lower, lower + 1], side="right"), last)
        low, high = _EDGES[at].tolist()
        return float(low + (high - low) * (rank - lower))
