# SPDX-License-Identifier: Apache-2.0
"""What the ways of finding block pairs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_reasoncache.filter.align import AcrossPair, BlockPair
from sglang_reasoncache.filter.proposal import FilterCounters
from sglang_reasoncache.filter.segment import Step


class Matcher:
    """Finds block pairs of one response, step by step. Not thread safe.

    Attributes:
        counters: What happened to the last step that was proposed.
    """

    counters = FilterCounters()

    def build(self, start: int, tokens: Sequence[int]) -> Step:
        """Make the step of ``tokens``, which begins at position ``start``. Steps are built in their
        order."""
        return Step.build(start, tokens, "")

    def propose(self, step: Step) -> list[BlockPair]:
        """Pairs of a block of ``step`` and an earlier block, ascending. ``step`` becomes an earlier
        step."""
        raise NotImplementedError

    def across(self) -> list[AcrossPair]:
        """Pairs with blocks of the response's group that may share now, ascending."""
        return []

    def join(self, member: int, group: Any) -> None:
        """Join a group under the id ``member``; None: leave the group."""
