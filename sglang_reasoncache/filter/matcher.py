# SPDX-License-Identifier: Apache-2.0
"""Block pairs, the base class of the matchers that find block pairs, and a matcher for random pairs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig


class BlockPair(NamedTuple):
    """The block that begins at ``dst_start`` may *read* (use) the slots of the block at ``src_start``, or vice
    versa (see :meth:`Matcher.propose`). Both starts are positions in prompt plus output."""

    dst_start: int
    src_start: int


class AcrossPair(NamedTuple):
    """The block at ``dst_start`` may read the block at ``src_start`` of the request ``source``, which is the
    same request or another one with the same prompt. ``source`` is an id from :meth:`FilterProcess.open`."""

    dst_start: int
    src_start: int
    source: int


@dataclass(slots=True)
class FilterCounters:
    """Counts from matching one finished step of a response.

    Attributes:
        candidates: With ``match=steps``: earlier steps whose similarity exceeds the lexical threshold.
            Otherwise: paired blocks of the step.
        dropped_structure: Candidates whose formal content (mathematics, code) differs from the step's.
        over_bound: Steps that were found to exceed a bound of ``Limits`` while this step was compared.
    """

    candidates: int = 0
    dropped_structure: int = 0
    over_bound: int = 0


class Matcher:
    """Finds block pairs of one response, step by step. Not thread safe.

    Attributes:
        counters: Counts for the last step that was passed to :meth:`propose`.
    """

    counters = FilterCounters()

    def build(self, start: int, tokens: Sequence[int]) -> Step:
        """Make a step from ``tokens``, which begin at position ``start``. Steps must be built in the order of
        the response."""
        return Step.build(start, tokens, "")

    def propose(self, step: Step) -> list[BlockPair]:
        """Pairs of a block of ``step`` (``dst``) and an earlier block (``src``), ascending. :class:`AgeRule`
        decides which block reads the other. Also remembers ``step``, so later steps may be paired with it.
        With ``align=nearest`` the pairs are alternatives: a block may be in several of them."""
        raise NotImplementedError

    def across(self) -> list[AcrossPair]:
        """Pairs that may share now, ascending. All sources are in the *group*: responses to the same prompt."""
        return []

    def quoted(self) -> list[BlockPair]:
        """Pairs that may share now, ascending: blocks that read blocks of the prompt."""
        return []

    def join(self, member: int, group: Any) -> None:
        """Join ``group`` under the id ``member``. If ``group`` is None, leave the current group."""


class RandomPairs(Matcher):
    """With probability ``config.random_ratio``, pairs a block with a uniformly random block of an earlier
    step. The same seed and steps give the same pairs."""

    def __init__(self, config: FilterConfig, seed: int) -> None:
        self._config = config
        self._random = random.Random(seed)
        # Starts of the earlier blocks.
        self._starts: list[int] = []
        # How many of these starts each step added.
        self._per_step: list[int] = []

    def propose(self, step: Step) -> list[BlockPair]:
        config = self._config
        earlier = self._starts
        ratio = config.random_ratio or 0.0
        starts = block_starts(step, config.block)
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


def block_starts(step: Step, block: int) -> range:
    """Starts of the consecutive blocks of ``step``."""
    return range(step.start, step.end - block + 1, block)
