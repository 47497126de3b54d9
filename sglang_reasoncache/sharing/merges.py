# SPDX-License-Identifier: Apache-2.0
"""Which positions will name the same slot once every accepted block shares."""

from collections.abc import Hashable, Sequence

#: ``HostRow.number`` and a position.
Key = tuple[int, int]


class Merges:
    """Disjoint sets of positions. A set holds the positions that will name one slot.

    An accepted block joins the set of each of its positions with the set of the position it will read.
    A block is refused if two such sets are the same already. So every accepted block frees one slot per
    position, in whatever order blocks share, and the ledger's sum is exact.
    """

    def __init__(self) -> None:
        # Row number -> position -> its set. Positions of one set have the same object. A position
        # without an entry is alone.
        self._sets: dict[int, dict[int, set[Key]]] = {}

    def _set(self, key: Key) -> set[Key]:
        number, position = key
        return self._sets.get(number, {}).get(position, {key})

    def _label(self, key: Key) -> Hashable:
        """The same for all positions of a set, and different from other sets."""
        number, position = key
        found = self._sets.get(number, {}).get(position)
        return key if found is None else id(found)

    def size(self, key: Key) -> int:
        """How many positions will name the slot of ``key``."""
        return len(self._set(key))

    def is_across(self, key: Key) -> bool:
        """Whether positions of several requests will name the slot of ``key``."""
        return any(number != key[0] for number, _ in self._set(key))

    def join(self, dst: Sequence[Key], src: Sequence[Key]) -> bool:
        """Join the sets of ``dst[i]`` and ``src[i]`` for every ``i``. Returns False and changes nothing if the
        two positions of any pair will name one slot anyway."""
        joined: dict[Hashable, Hashable] = {}
        pairs = list(zip(dst, src, strict=True))
        for one, other in pairs:
            low, high = self._label(one), self._label(other)
            while low in joined:
                low = joined[low]
            while high in joined:
                high = joined[high]
            if low == high:
                return False
            joined[low] = high
        for one, other in pairs:
            few, many = sorted((self._set(one), self._set(other)), key=len)
            many |= few
            for number, position in (*few, one, other):
                self._sets.setdefault(number, {})[position] = many
        return True

    def remove(self, number: int) -> None:
        """Forget the positions of row ``number``, which is gone. Positions of other rows stay in their sets."""
        for position, positions in self._sets.pop(number, {}).items():
            positions.discard((number, position))
