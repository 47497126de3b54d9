# SPDX-License-Identifier: Apache-2.0
"""Decides which block of a pair reads the other block's slots, and from when on."""

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.settings import FilterConfig


class AgeRule:
    """Holds a block pair back until ``min_age`` tokens follow the block that will read the other block's slots.

    A model attends most to the newest tokens, so replacing the KV of these tokens does the most damage. In
    direction ``oldest`` the later block of a pair reads the earlier block. In direction ``newest`` the earlier
    block reads the newest equal block, which is looked up only when the pair is released. So a block usually
    switches to other slots at most once per ``min_age`` tokens, however often its tokens repeat.

    Args:
        start_position: Position of the first output token. No block begins before it.
    """

    def __init__(self, config: FilterConfig, start_position: int) -> None:
        self._block = config.block
        self._min_age = config.min_age
        self._chains = (
            Chains(config.block, start_position) if config.direction == "newest" else None
        )
        # A heap of readers, each with the block with which it was paired.
        self._waiting: list[tuple[int, int]] = []

    def release(self, pairs: Iterable[tuple[int, int]], end: int) -> list[BlockPair]:
        """Take pairs (start of the later block, start of the earlier block). Returns all pairs (reader, source)
        whose reader is old enough, now that the response ends at position ``end``. In direction ``newest`` a
        pair whose reader would overlap another reader is not returned, because no token may read twice."""
        chains = self._chains
        if chains is not None:
            chains.extend(end)
        for later, earlier in pairs:
            if chains is None:
                reader = later
                source = earlier
                waits = reader - source >= self._block
            else:
                reader = chains.newest(earlier)
                source = later
                waits = source - reader >= self._block and chains.add(reader, source)
            if waits:
                heapq.heappush(self._waiting, (reader, source))
        ready = []
        while self._waiting and self._waiting[0][0] + self._block <= end - self._min_age:
            reader, source = heapq.heappop(self._waiting)
            if chains is not None:
                source = chains.newest(source)
            ready.append(BlockPair(reader, source))
        return ready


class StepAgeRule:
    """Holds the alternatives of a step (``align=nearest``) back until ``min_age`` tokens follow the last block
    that may read. All are released together, because their KV distances decide which of them share. Only for
    direction ``oldest``, in which the later block of a pair reads the earlier one."""

    def __init__(self, config: FilterConfig) -> None:
        self._block = config.block
        self._min_age = config.min_age
        self._waiting: deque[tuple[BlockPair, ...]] = deque()

    def release(self, alternatives: Sequence[BlockPair], end: int) -> list[tuple[BlockPair, ...]]:
        """Take the alternatives of one step, ascending. Returns those of each step that is old enough, now that
        the response ends at position ``end``."""
        if alternatives:
            self._waiting.append(tuple(alternatives))
        ready = []
        while self._waiting:
            last = self._waiting[0][-1].dst_start
            if last + self._block > end - self._min_age:
                break
            ready.append(self._waiting.popleft())
        return ready


class Chains:
    """Chains of equal blocks of one response. From each block but the newest a *link* leads to a later block.

    A *reader* is a block that reads the block to which its link leads. Readers do not overlap. A block that
    overlaps two adjacent readers has a link if these read adjacent blocks: to the block that overlaps them in
    the same way. In a text of period 9, for example, links lead from all blocks between the first and the last
    reader to the blocks 9 tokens later.

    A link never changes, and new links begin at the newest blocks of chains. So a block may as well lead to any
    later block of its chain: a look-up lets all blocks that it passes lead to the newest. Then a look-up takes
    O(log n) operations on average, n being the length of the response. A token takes 8 bytes.
    """

    def __init__(self, block: int, start_position: int) -> None:
        self._block = block
        self._start = start_position
        # For each token: distance from its reader to the block that this reads, or 0 if it is in no reader.
        self._distances = array("i")
        # For the block that begins at each token: distance to a later block of its chain, or 0 if unknown.
        self._jumps = array("i")

    def extend(self, end: int) -> None:
        """Make room for blocks up to position ``end``."""
        missing = max(0, end - self._start - len(self._jumps))
        zeros = bytes(missing * self._jumps.itemsize)
        self._distances.frombytes(zeros)
        self._jumps.frombytes(zeros)

    def add(self, start: int, later: int) -> bool:
        """Link the newest block of a chain, at ``start``, to the block at ``later``. Returns whether the block
        at ``start`` becomes a reader, which it does unless it overlaps a reader."""
        offset = start - self._start
        end = offset + self._block
        self._jumps[offset] = later - start
        if any(self._distances[offset:end]):
            return False
        self._distances[offset:end] = array("i", [later - start]) * self._block
        return True

    def newest(self, start: int) -> int:
        """Start of the newest block in the chain of the block at ``start``."""
        offset = start - self._start
        passed = []
        while jump := self._jumps[offset] or self._link(offset):
            passed.append(offset)
            offset += jump
        for earlier in passed:
            self._jumps[earlier] = offset - earlier
        return self._start + offset

    def _link(self, offset: int) -> int:
        """Distance over which a link leads from the block at ``offset`` because of the readers of its tokens. 0
        if these give it no link."""
        distance = self._distances[offset]
        tokens = self._distances[offset : offset + self._block]
        return distance if tokens.count(distance) == self._block else 0
