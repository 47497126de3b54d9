# SPDX-License-Identifier: Apache-2.0
"""Policies that rank positions by the attention they got."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang_reasoncache.eviction.policies.contract import (
    ATTENTION,
    KEYS,
    Eviction,
    RequestView,
    StatisticsNeeds,
)
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor, bounded, pooled
from sglang_reasoncache.policy_options import OptionError, one_of

if TYPE_CHECKING:
    import torch

_EPSILON = 1e-8
#: Cosines computed at once.
_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class H2O(ScoringEvictor):
    """H2O (Zhang et al., 2023): gives up the positions of the least total weight; the paper does so
    at every token.

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


@dataclass(frozen=True)
class SnapKV(ScoringEvictor):
    """SnapKV (Li et al., 2024): brings the prompt down to the budget once it has been computed; the
    response stays.

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


def redundancy(keys: torch.Tensor, threshold: float, reach: int) -> torch.Tensor:
    """``[held, heads, head_dim]`` to ``[held, heads]``, the paper's R: a softmax over positions
    of how similar the others are to each on average.

    Each key spares the newest of those whose cosine with it is above ``threshold``, sought
    among the newest ``reach`` keys: one of several similar keys has to stay.
    """
    count = len(keys)
    unit = (keys / (keys.norm(dim=-1, keepdim=True) + _EPSILON)).transpose(0, 1)
    # The sum of a key's cosines with all others, as one product with the sum of all keys.
    sums = (unit * (unit.sum(dim=1, keepdim=True) - unit)).sum(dim=-1)
    first = max(0, count - reach)
    newest = unit[:, first:].transpose(1, 2)
    order = sums.new_ones(count - first).cumsum(0)
    rows = max(1, _ELEMENTS // max(1, len(unit) * len(order)))
    for begin in range(0, count, rows):
        cosines = unit[:, begin : begin + rows] @ newest
        # No key is like itself.
        cosines.diagonal(begin - first, 1, 2).zero_()
        spared = ((cosines > threshold) * order).max(dim=-1, keepdim=True)
        saved = cosines.gather(-1, spared.indices) * (spared.values > 0)
        sums.scatter_add_(1, spared.indices[..., 0] + first, -saved[..., 0])
    return (sums / max(1, count)).softmax(dim=-1).T


@dataclass(frozen=True)
class RKV(ScoringEvictor):
    """R-KV (Cai et al., 2025): gives up the positions of lowest
    ``mix * importance - (1 - mix) * redundancy``.

    Importance is the weight by the newest ``alpha`` queries, the maximum of each ``kernel``
    neighbours. The paper compresses every 128 tokens and always keeps the newest ``alpha``.

    Attributes:
        mix: The paper's lambda.
        alpha: Queries that count.
        kernel: Held positions whose weights are pooled, an odd number.
        threshold: Cosine from which two keys count as similar.
        reach: Newest held positions among which a key finds one like it; none in the paper,
            which holds no more than its budget.
    """

    needs = frozenset({KEYS, ATTENTION})

    slack: int = 128
    recent: int = 8
    mix: float = bounded(0.1, 0, 1)
    alpha: int = bounded(8, 1, 64)
    kernel: int = bounded(7, 1, 63)
    threshold: float = bounded(0.5, -1, 1)
    reach: int = bounded(512, 1, 65_536)

    @property
    def statistics_needs(self) -> StatisticsNeeds:
        return StatisticsNeeds(latest=self.alpha, prompt=self.alpha)

    def scores(self, view: RequestView) -> np.ndarray:
        importance = pooled(view.attention.latest(self.alpha), self.kernel, "max")
        redundant = view.keys.token_scores(
            lambda keys: redundancy(keys, self.threshold, self.reach)
        )
        return (1 - self.mix) * redundant - self.mix * importance
