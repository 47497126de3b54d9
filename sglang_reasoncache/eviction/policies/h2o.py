# SPDX-License-Identifier: Apache-2.0
"""H2O (Zhang et al., 2023): heavy hitters of accumulated attention, and a recent part, stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_reasoncache.eviction.policies.contract import ATTENTION, RequestView, StatisticsNeeds
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor
from sglang_reasoncache.policy_options import between


@dataclass(frozen=True)
class H2O(ScoringEvictor):
    """Gives up the positions that queries so far gave the least weight, added up.

    The paper spends half of the budget on the newest positions and evicts at every token
    (``slack=0``).

    Attributes:
        recent_share: Of the budget, for the newest positions; at least ``recent`` of them.
        prompt_queries: Queries at the end of a prompt that count; the paper adds up all of them.
    """

    needs = frozenset({ATTENTION})

    recent_share: float = 0.5
    prompt_queries: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        between("recent_share", self.recent_share, 0, 1)
        between("prompt_queries", self.prompt_queries, 0, 256)

    @property
    def statistics_needs(self) -> StatisticsNeeds:
        return StatisticsNeeds(total=True, prompt=self.prompt_queries)

    def candidates(self, view: RequestView) -> np.ndarray:
        newest = int(self.recent_share * self.allowed(view.written))
        return view.candidates(max(self.recent, newest))

    def scores(self, view: RequestView) -> np.ndarray:
        return -view.attention.total()
