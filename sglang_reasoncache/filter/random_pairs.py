# SPDX-License-Identifier: Apache-2.0
"""Random sharing: the ablation that shows what careless sharing costs."""

from __future__ import annotations

import random

from sglang_reasoncache.filter.align import grid_blocks
from sglang_reasoncache.filter.proposal import CandidatePair
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

    def propose(self, step: Step) -> list[CandidatePair]:
        """Random pairs for a step that is not yet in the history."""
        ratio, block = self._config.random_ratio or 0.0, self._config.block
        return [
            CandidatePair(start, self._random.choice(self._starts), block, 0.0)
            for start in self._blocks(step)
            if self._starts and self._random.random() < ratio
        ]

    def add(self, step: Step) -> None:
        """Make a step an earlier one; forget the oldest if there are too many."""
        starts = self._blocks(step)
        self._starts += starts
        self._per_step.append(len(starts))
        if len(self._per_step) > self._config.max_history_steps:
            del self._starts[: self._per_step.pop(0)]

    def _blocks(self, step: Step) -> list[int]:
        blocks = grid_blocks(step, self._config.block, self._config.page_size)
        return [step.start + offset for offset in blocks]
