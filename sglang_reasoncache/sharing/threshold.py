# SPDX-License-Identifier: Apache-2.0
"""The adaptive threshold on KV distances (ReasonCache, stage 2).

A block pair may share if its distance is at most the p-th percentile of the distances seen so far.
During a warm-up nothing shares.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_LOW, _HIGH, _PER_DECADE = 1e-7, 1e3, 256
#: Upper edges of the bins: 0, 1e-7, then 256 edges per factor of ten up to 1e3. The last bin counts
#: larger distances as 1e3. A distance in [1e-7, 1e3] counts as the upper edge of its bin, which is at
#: most 10 ** (1 / 256) = 1.00904 times the distance.
_EDGES = np.concatenate(
    [[0.0, _LOW], _LOW * 10.0 ** (np.arange(1, 10 * _PER_DECADE + 1) / _PER_DECADE), [_HIGH]]
)
#: All counts are halved when their sum exceeds this, so that the percentile of a server that runs for
#: weeks still follows its load.
_FULL = 2.0**21


class AdaptiveThreshold:
    """The p-th percentile of a stream of distances, kept as a histogram of constant size.

    For distances that are 0 or in [1e-7, 1e3] the value is at least the exact percentile (numpy's
    default, linear interpolation between order statistics) and at most 0.91% above it. After 2**21
    distances the older ones count less. Not thread safe.

    Args:
        percentile: p, 0 to 100. 0 accepts nothing, 100 every finite distance after the warm-up.
        warmup: Distances seen before the first one is accepted.

    Attributes:
        num_observed: Distances seen since the start.
    """

    def __init__(self, percentile: float = 80.0, warmup: int = 128) -> None:
        self._percentile, self._warmup = percentile, warmup
        self._bins = np.zeros(len(_EDGES))
        self.num_observed = 0

    @property
    def share(self) -> float:
        """The share of distances that is accepted in the long run, 0 to 1."""
        return self._percentile / 100

    @property
    def is_warm(self) -> bool:
        return self.num_observed >= self._warmup

    @property
    def value(self) -> float:
        """The largest distance accepted now. Negative: none is accepted; infinite: all are."""
        if self._percentile <= 0 or not self.is_warm:
            return -1.0
        return math.inf if self._percentile >= 100 else self._value()

    def decide(self, distances: Sequence[float]) -> npt.NDArray[np.bool_]:
        """Observe ``n`` distances, then judge each: bool ``[n]``, whether the pair may share.

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
        """JSON for the endpoint. ``distance`` is None if every finite distance is accepted."""
        value = self.value
        return {
            "percentile": self._percentile,
            "observations": self.num_observed,
            "warm": self.is_warm,
            "distance": value if math.isfinite(value) else None,
        }

    def _value(self) -> float:
        """The percentile; negative if nothing was observed."""
        cumulated = np.cumsum(self._bins)
        if not cumulated[-1] > 0:
            return -1.0
        rank = max(0.0, (cumulated[-1] - 1.0) * self._percentile / 100.0)
        lower = math.floor(rank)
        # After a halving the counts are fractions, and the last ones may add up to less than 1.
        last = np.searchsorted(cumulated, cumulated[-1])
        at = np.minimum(np.searchsorted(cumulated, [lower, lower + 1], side="right"), last)
        low, high = _EDGES[at].tolist()
        return float(low + (high - low) * (rank - lower))
