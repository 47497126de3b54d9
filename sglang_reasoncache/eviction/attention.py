# SPDX-License-Identifier: Apache-2.0
"""Attention statistics of a request's held positions, over all tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import ATTENTION, NamedPolicy, StatisticsNeeds
from sglang_reasoncache.eviction.statistics import AttentionStatistics


@dataclass(frozen=True)
class AttentionSource:
    """One per scheduler.

    Attributes:
        statistics: Of this rank's attention backend.
        heads: Query heads of all layers and ranks.
        group: CPU process group of the tensor-parallel ranks, None when alone.
    """

    statistics: AttentionStatistics
    heads: int
    group: Any = None

    def of(self, row: int, held: np.ndarray) -> HeldAttention:
        """Statistics of positions ``held`` (int64, none evicted) of a row."""
        # A copy, whatever a policy does to its view.
        return HeldAttention(self, row, torch.from_numpy(held.copy()))


@dataclass(frozen=True)
class HeldAttention:
    """See ``Attention`` of the policies' contract. Valid until the next forward."""

    _source: AttentionSource
    _row: int
    _held: torch.Tensor

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
    policies: list[Any] = [policy for _, policy in evictors if ATTENTION in policy.needs]
    if not policies:
        return None
    latest, total, prompt = zip(*(policy.statistics_needs for policy in policies), strict=True)
    return StatisticsNeeds(max(latest), any(total), max(prompt))
