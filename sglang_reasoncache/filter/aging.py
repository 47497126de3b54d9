# SPDX-License-Identifier: Apache-2.0
"""Which of two equal blocks reads the other's slots, and when."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from sglang_reasoncache.filter.align import BlockPair
from sglang_reasoncache.filter.settings import FilterConfig


class AgeRule:
    """Holds block pairs back until the positions that read are ``min_age`` behind the end.

    A model looks back at what it just wrote; an older copy in its place does most of the damage.
    In direction ``newest`` the earlier block reads the slots of the newest equal one. A chain of
    equal blocks is followed to its end at the time of release, so the readers of a block mostly
    move once in ``min_age`` tokens, however often it repeats.
    """

    def __init__(self, config: FilterConfig) -> None:
        self._block, self._min_age = config.block, config.min_age
        self._newest = config.direction == "newest"
        # Starts of blocks that will read and that read -> start of the block they read.
        self._waiting: dict[int, int] = {}
        self._released: dict[int, int] = {}
        self._order: list[int] = []

    def release(self, found: Iterable[tuple[int, int]], end: int) -> list[BlockPair]:
        """Take pairs (later block, earlier block); pairs whose readers are old enough at ``end``."""
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
        """The newest block of the chain of equal blocks that begins at ``start``."""
        at = start
        while (later := self._next(at)) is not None:
            at = later
        if start in self._released:
            self._released[start] = at
        return at

    def _next(self, at: int) -> int | None:
        """The later block that the one at ``at`` reads. A block without an entry may lie in two
        neighbours whose sources are neighbours, too."""
        pairs = (self._waiting, self._released)
        for back in range(self._block):
            found = [one[at - back] for one in pairs if at - back in one]
            if found and back == 0:
                return found[0]
            behind = at - back + self._block
            if found and found[0] + self._block in [one[behind] for one in pairs if behind in one]:
                return found[0] + back
        return None
