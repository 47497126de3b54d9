# SPDX-License-Identifier: Apache-2.0
"""Which positions will name one slot once every accepted block shares."""

from __future__ import annotations

from collections.abc import Sequence

#: A row's number and a position.
Key = tuple[int, int]


class Merges:
    """Disjoint sets of positions: a block joins each of its positions with the one it will read.

    A block is accepted only if it joins sets that were apart. Then every accepted block frees a
    slot for each of its positions, in whatever order blocks share, so the ledger's sum is exact.
    """

    def __init__(self) -> None:
        self._above: dict[Key, Key] = {}
        self._sizes: dict[Key, int] = {}
        # Sets with positions of several requests.
        self._across: set[Key] = set()

    def _root(self, key: Key) -> Key:
        above = self._above
        while key in above:
            # Halve the path.
            up = above[key]
            above[key] = key = above.get(up, up)
        return key

    def size(self, key: Key) -> int:
        """Positions that will name the slot of this one."""
        return self._sizes.get(self._root(key), 1)

    def is_across(self, key: Key) -> bool:
        """Whether another request's positions are among them."""
        return self._root(key) in self._across

    def join(self, dst: Sequence[Key], src: Sequence[Key]) -> bool:
        """Let each position of ``dst`` read the one of ``src``; False, and nothing changes, where
        two of them will name one slot anyway."""
        joined: dict[Key, Key] = {}
        for one, other in zip(dst, src, strict=True):
            low, high = self._root(one), self._root(other)
            while low in joined:
                low = joined[low]
            while high in joined:
                high = joined[high]
            if low == high:
                return False
            joined[low] = high
        for low, high in joined.items():
            if low in self._across or high in self._across or low[0] != high[0]:
                self._across.add(high)
            self._sizes[high] = self._sizes.get(high, 1) + self._sizes.pop(low, 1)
            self._across.discard(low)
            self._above[low] = high
        return True
