# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of a request's held positions, over all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import ATTENTION, NamedPolicy, Observation
from sglang_reasoncache.eviction.statistics import AttentionStatistics


class WeightSource:
    """One per scheduler.

    Args:
        statistics: Of this rank's attention backend.
        heads: Query heads of all layers and ranks.
        group: CPU process group of the tensor-parallel ranks, None when alone.
    """

    def __init__(self, statistics: AttentionStatistics, heads: int, group: Any = None) -> None:
        self.statistics = statistics
        self.heads = heads
        self.group = group

    def of(self, row: int, held: np.ndarray) -> HeldWeights:
        """Weights of positions ``held`` (int64, no evicted positions) of a row."""
        return HeldWeights(self, row, held)


class HeldWeights:
    """See :class:`~sglang_reasoncache.eviction.policies.contract.Attention`. Valid until the next forward."""

    def __init__(self, source: WeightSource, row: int, held: np.ndarray) -> None:
        self._source = source
        self._row = row
        # Whatever a policy does to its view.
        self._held = torch.from_numpy(held.copy())

    def latest(self, queries: int) -> np.ndarray:
        return self._over_ranks(self._source.statistics.latest(self._row, self._held, queries))

    def total(self) -> np.ndarray:
        return self._over_ranks(self._source.statistics.total(self._row, self._held))

    def _over_ranks(self, sums: torch.Tensor) -> np.ndarray:
        if self._source.group is not None:
            torch.distributed.all_reduce(sums, group=self._source.group)
        return (sums / self._source.heads).numpy()


def observation_of(evictors: Iterable[NamedPolicy]) -> Observation | None:
    """What all ``evictors`` together read; None: nothing."""
    wanted = [policy.observes for _, policy in evictors if ATTENTION in policy.needs]  # type: ignore[attr-defined]
    if not wanted:
        return None
    return Observation(
        latest=max(each.latest for each in wanted),
        total=any(each.total for each in wanted),
        prompt=max(each.prompt for each in wanted),
    )
