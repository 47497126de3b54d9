# SPDX-License-Identifier: Apache-2.0
"""Decides which block of a pair reads the other's slots, and when."""

import heapq
from collections.abc import Iterable

from sglang_reasoncache.filter.align import BlockPair
from sglang_reasoncache.filter.settings import FilterConfig


class AgeRule:
    """Holds a block pair back until the block that reads is ``min_age`` tokens behind the end.

    A model attends most to what it just wrote, so replacing its newest text by an older copy does most of the
    damage. In direction ``newest`` the earlier block reads the slots of the newest equal block, the end of the
    chain of equal blocks. It is looked up only when the pair is released. So a block is usually redirected at
    most once in ``min_age`` tokens, however often it repeats.
    """

    def __init__(self, config: FilterConfig) -> None:
        self._block, self._min_age = config.block, config.min_age
        self._newest = config.direction == "newest"
        # Start of a block that will read, or reads -> start of the block that it reads.
        self._waiting: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._order: list[int] = []

    def release(self, found: Iterable[tuple[int, int]], end: int) -> list[BlockPair]:
        """Take pairs (start of the later block, start of the earlier one). Returns the pairs whose reader
        is old enough when the response ends at position ``end``."""
        for later, earlier in found:
            reader, source = later, earlier
            if self._newest:
                reader, source = self._last(earlier), later
            distance = source - reader if self._newest else reader - source
            if distance >= self._block and reader not in self._waiting:
                self._waiting[reader] = source
                heapq.heappush(self._order, reader)
        ready = []
        while self._order and self._order[0] + self._block <= end - self._min_age:
            reader = heapq.heappop(self._order)
            source = self._waiting.pop(reader)
            if self._newest:
                source = self._released[reader] = self._last(source)
            ready.append(BlockPair(reader, source))
        return ready

    def _last(self, start: int) -> int:
        """Start of the newest block in the chain of equal blocks that begins at ``start``."""
        at = start
        while (later := self._next(at)) is not None:
            at = later
        if start in self._released:
            self._released[start] = at
        return at

    def _next(self, at: int) -> int | None:
        """Start of the later block that the block at ``at`` reads; None if it reads none. A block without an
        entry of its own may overlap two neighbouring readers. It reads their sources if these are
        neighbours."""
        pairs = (self._waiting, self._released)
        for back in range(self._block):
            found = [one[at - back] for one in pairs if at - back in one]
            if found and back == 0:
                return found[0]
            behind = at - back + self._block
            if found and found[0] + self._block in [one[behind] for one in pairs if behind in one]:
                return found[0] + back
        return None
