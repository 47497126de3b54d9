# SPDX-License-Identifier: Apache-2.0
"""Random sharing: the ablation that shows what careless sharing costs."""

from __future__ import annotations

import random

from sglang_reasoncache.filter.align import BlockPair, block_starts
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.step import Step


class RandomPairs:
    """Pairs blocks with uniformly random blocks of earlier steps. Not thread safe.

    Each block is paired with probability ``config.random_ratio``. The same seed and steps
    give the same pairs, on every rank.
    """

    def __init__(self, config: FilterConfig, seed: int) -> None:
        self._config = config
        self._random = random.Random(seed)
        # Starts of all earlier blocks; how many each retained step added.
        self._starts: list[int] = []
        self._per_step: list[int] = []

    def propose(self, step: Step) -> list[BlockPair]:
        """Random pairs for a step, which becomes an earlier one; the oldest may be forgotten."""
        config = self._config
        ratio, earlier = config.random_ratio or 0.0, self._starts
        starts = block_starts(step, config.block, config.page_size)
        pairs = [
            BlockPair(start, self._random.choice(earlier))
            for start in starts
            if earlier and self._random.random() < ratio
        ]
        earlier += starts
        self._per_step.append(len(starts))
        if len(self._per_step) > config.max_history_steps:
            del earlier[: self._per_step.pop(0)]
        return pairs
