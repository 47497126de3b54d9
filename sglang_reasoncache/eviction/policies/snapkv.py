# SPDX-License-Identifier: Apache-2.0
"""SnapKV (Li et al., 2024): what a prompt's last queries attend to stays of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sglang_reasoncache.eviction.policies.contract import (
    ATTENTION,
    Eviction,
    RequestView,
    StatisticsNeeds,
)
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor, bounded, pooled
from sglang_reasoncache.policy_options import OptionError, one_of


@dataclass(frozen=True)
class SnapKV(ScoringEvictor):
    """Brings the prompt down to the budget once it has been computed; the response stays.

    Kept are its last ``window`` positions, and those with the highest weight by its last
    ``window`` queries, pooled over neighbours. A prompt in chunks is brought down after each.

    Attributes:
        window: Positions at the end of the prompt whose queries count, and stay.
        kernel: Positions pooled.
        pooling: ``avg`` or ``max``.
    """

    needs = frozenset({ATTENTION})

    # At once: later queries push those of the prompt out of the window.
    slack: int = 1
    prompt: bool = True
    window: int = bounded(32, 1, 256)
    kernel: int = bounded(7, 1, 63)
    pooling: str = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("pooling", self.pooling, ("avg", "max"))
        if not self.prompt:
            raise OptionError("prompt", "true, as it gives up positions of the prompt only")

    @property
    def statistics_needs(self) -> StatisticsNeeds:
        return StatisticsNeeds(latest=self.window, prompt=self.window)

    def evict(self, view: RequestView, excess: int) -> Iterable[Eviction]:
        # How much of what is too much is prompt could not be known before.
        end = min(view.prompt, view.written)
        excess = int(np.searchsorted(view.held, end)) - self.allowed(end)
        return super().evict(view, excess) if excess > 0 else []

    def candidates(self, view: RequestView) -> np.ndarray:
        response = view.written - min(view.prompt, view.written)
        return view.candidates(max(self.recent, response + self.window))

    def scores(self, view: RequestView) -> np.ndarray:
        weights = view.attention.latest(self.window)
        prompt = view.held < min(view.prompt, view.written) - self.window
        scores = np.zeros(len(view.held))
        scores[prompt] = pooled(weights[prompt], self.kernel, self.pooling)
        return -scores
