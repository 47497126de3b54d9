# SPDX-License-Identifier: Apache-2.0
"""Block pairs, the interface of all matchers that find them, and the simplest matcher: random pairs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig


class BlockPair(NamedTuple):
    """The block that begins at ``dst_start`` may read the slots of the block that begins at ``src_start``.
    Both are positions in prompt plus output."""

    dst_start: int
    src_start: int


class AcrossPair(NamedTuple):
    """As :class:`BlockPair`, but the block at ``src_start`` belongs to the request ``source``, which may be
    the same request. ``source`` is an id from :meth:`FilterProcess.open`."""

    dst_start: int
    src_start: int
    source: int


@dataclass(slots=True)
class FilterCounters:
    """Counts of what happened to one finished step.

    Attributes:
        candidates: Earlier steps above the lexical threshold (``match=steps``), or paired blocks
            (``match=runs``).
        dropped_structure: Candidates whose formal content differs.
        over_bound: Steps that exceeded a bound of ``Limits`` when they were parsed to compare this step.
    """

    candidates: int = 0
    dropped_structure: int = 0
    over_bound: int = 0


class Matcher:
    """Finds block pairs of one response, step by step. Not thread safe.

    Attributes:
        counters: What happened to the last step that :meth:`propose` took.
    """

    counters = FilterCounters()

    def build(self, start: int, tokens: Sequence[int]) -> Step:
        """Make the step of ``tokens``, which begins at position ``start``. Steps are built in the order of the
        response."""
        return Step.build(start, tokens, "")

    def propose(self, step: Step) -> list[BlockPair]:
        """Pairs of a block of ``step`` and an earlier block, ascending. Later steps may then be paired with
        ``step``."""
        raise NotImplementedError

    def across(self) -> list[AcrossPair]:
        """Pairs with blocks of the response's group that may share now, ascending."""
        return []

    def join(self, member: int, group: Any) -> None:
        """Join ``group`` under the id ``member``. If ``group`` is None, leave the current group."""


class RandomPairs(Matcher):
    """Pairs each block, with probability ``config.random_ratio``, with a uniformly random block of an
    earlier step. The same seed and steps give the same pairs."""

    def __init__(self, config: FilterConfig, seed: int) -> None:
        self._config = config
        self._random = random.Random(seed)
        # Starts of all earlier blocks; for each remembered step, how many starts it added.
        self._starts: list[int] = []
        self._per_step: list[int] = []

    def propose(self, step: Step) -> list[BlockPair]:
        config, earlier = self._config, self._starts
        ratio = config.random_ratio or 0.0
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
        self.counters = FilterCounters(candidates=len(pairs))
        return pairs


def block_starts(step: Step, block: int, page_size: int) -> range:
    """First positions of the step's consecutive blocks, from its first page boundary on."""
    first = step.start + -step.start % page_size
    return range(first, step.end - block + 1, block)
