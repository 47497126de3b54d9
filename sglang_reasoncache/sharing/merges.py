# SPDX-License-Identifier: Apache-2.0
"""Which positions will name the same slot once every accepted block shares."""

from __future__ import annotations

from collections.abc import Sequence

#: ``HostRow.number`` and a position.
Key = tuple[int, int]


class Merges:
    """Disjoint sets of positions (union-find). A set holds the positions that will name one slot.

    An accepted block joins the set of each of its positions with the set of the position it will read.
    A block is refused if two such sets are the same already. So every accepted block frees one slot per
    position, in whatever order blocks share, and the ledger's sum is exact.
    """

    def __init__(self) -> None:
        self._above: dict[Key, Key] = {}
        self._sizes: dict[Key, int] = {}
        # Roots of sets with positions of several requests.
        self._across: set[Key] = set()

    def _root(self, key: Key) -> Key:
        above = self._above
        while key in above:
            # Halve the path.
            up = above[key]
            above[key] = key = above.get(up, up)
        return key

    def size(self, key: Key) -> int:
        """How many positions will name the slot of ``key``."""
        return self._sizes.get(self._root(key), 1)

    def is_across(self, key: Key) -> bool:
        """Whether positions of several requests will name the slot of ``key``."""
        return self._root(key) in self._across

    def join(self, dst: Sequence[Key], src: Sequence[Key]) -> bool:
        """Join each of ``dst`` with the one at the same index of ``src``. Returns False and changes
        nothing if the two positions of any pair will name one slot anyway."""
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
