# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of a request's held positions, over all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import ATTENTION, NamedPolicy, StatisticsNeeds
from sglang_reasoncache.eviction.statistics import AttentionStatistics


class AttentionSource:
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

    def of(self, row: int, held: np.ndarray) -> HeldAttention:
        """Statistics of positions ``held`` (int64, none evicted) of a row."""
        return HeldAttention(self, row, held)


class HeldAttention:
    """See ``Attention`` of the policies' contract. Valid until the next forward."""

    def __init__(self, source: AttentionSource, row: int, held: np.ndarray) -> None:
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


def needs_of(evictors: Iterable[NamedPolicy]) -> StatisticsNeeds | None:
    """What all ``evictors`` together read; None: nothing."""
    needs: list[Any] = [
        policy.statistics_needs  # type: ignore[attr-defined]
        for _, policy in evictors
        if ATTENTION in policy.needs
    ]
    if not needs:
        return None
    return StatisticsNeeds(
        latest=max(each.latest for each in needs),
        total=any(each.total for each in needs),
        prompt=max(each.prompt for each in needs),
    )
