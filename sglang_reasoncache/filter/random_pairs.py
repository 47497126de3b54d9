# SPDX-License-Identifier: Apache-2.0
"""Random sharing: the ablation that shows what careless sharing costs."""

from __future__ import annotations

import random

from sglang_reasoncache.filter.align import grid_blocks
from sglang_reasoncache.filter.proposal import CandidatePair
from sglang_reasoncache.filter.step import Step


class RandomPairs:
    """Pairs blocks with uniformly random blocks of earlier steps.

    Blocks are counted from a step's start, or on the page grid. The same seed
    and steps give the same pairs, on every rank. Not thread safe.

    Args:
        ratio: probability of each block to be paired, 0 to 1.
        max_steps: earlier steps to draw from; older ones are forgotten.
    """

    def __init__(self, ratio: float, block: int, page_size: int, max_steps: int, seed: int) -> None:
        self._ratio = ratio
        self._block = block
        self._page_size = page_size
        self._max_steps = max_steps
        self._random = random.Random(seed)
        # Starts of all earlier blocks; how many each retained step added.
        self._starts: list[int] = []
        self._per_step: list[int] = []

    def propose(self, step: Step) -> list[CandidatePair]:
        """Random pairs for a step that is not yet in the history."""
        found: list[CandidatePair] = []
        if not self._starts:
            return found
        for offset in grid_blocks(step, self._block, self._page_size):
            if self._random.random() < self._ratio:
                source = self._random.choice(self._starts)
                found.append(CandidatePair(step.start + offset, source, self._block, 0.0))
        return found

    def add(self, step: Step) -> None:
        """Make a step an earlier one."""
        before = len(self._starts)
        self._starts += [
            step.start + offset for offset in grid_blocks(step, self._block, self._page_size)
        ]
        self._per_step.append(len(self._starts) - before)
        if len(self._per_step) > self._max_steps:
            del self._starts[: self._per_step.pop(0)]
