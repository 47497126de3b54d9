# SPDX-License-Identifier: Apache-2.0
"""H2O (Zhang et al., 2023): heavy hitters of accumulated attention, and a recent part, stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_reasoncache.eviction.policies.contract import ATTENTION, RequestView, StatisticsNeeds
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor, bounded


@dataclass(frozen=True)
class H2O(ScoringEvictor):
    """Gives up the positions of the least total weight; the paper does so at every token.

    Attributes:
        recent_share: Of the budget, for the newest positions; at least ``recent`` of them.
        prompt_queries: Queries at the end of a prompt that count; the paper adds up all of them.
    """

    needs = frozenset({ATTENTION})

    recent_share: float = bounded(0.5, 0, 1)
    prompt_queries: int = bounded(32, 0, 256)

    @property
    def statistics_needs(self) -> StatisticsNeeds:
        return StatisticsNeeds(total=True, prompt=self.prompt_queries)

    def candidates(self, view: RequestView) -> np.ndarray:
        newest = int(self.recent_share * self.allowed(view.written))
        return view.candidates(max(self.recent, newest))

    def scores(self, view: RequestView) -> np.ndarray:
        return -view.attention.total()
