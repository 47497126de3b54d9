# SPDX-License-Identifier: Apache-2.0
"""Keeps track of which positions will map to one slot once all accepted blocks share."""

from collections.abc import Hashable, Sequence

#: ``HostRow.number`` and a position.
Key = tuple[int, int]


class Merges:
    """Disjoint sets of positions. All positions of a set will map to one slot once all accepted blocks share.

    Accepting a block joins the set of each of its positions with the set of the position at the same place in
    the source. If the two positions of such a pair are in one set already, the block is refused. So every
    accepted block frees one slot per position, in whatever order blocks share, as ``Ledger.slots`` assumes.
    """

    def __init__(self) -> None:
        # The set of a position, by row number and position. All positions of a set refer to the same object.
        # A position without an entry is alone in its set.
        self._sets: dict[int, dict[int, set[Key]]] = {}

    def _set(self, key: Key) -> set[Key]:
        number, position = key
        return self._sets.get(number, {}).get(position, {key})

    def _label(self, key: Key) -> Hashable:
        """A label that is the same for all positions of a set, and differs from the labels of other sets."""
        number, position = key
        members = self._sets.get(number, {}).get(position)
        return key if members is None else id(members)

    def size(self, key: Key) -> int:
        """How many positions, ``key`` included, will map to the slot of ``key``."""
        return len(self._set(key))

    def is_across(self, key: Key) -> bool:
        """Whether a position of another request will map to the same slot as ``key``."""
        return any(number != key[0] for number, _ in self._set(key))

    def would_repeat(self, dst: Sequence[Key], src: Sequence[Key]) -> bool:
        """Whether, for some ``i``, ``dst[i]`` and ``src[i]`` are in one set already, or would be after joining
        earlier pairs. Changes nothing."""
        joined: dict[Hashable, Hashable] = {}
        for reader, source in zip(dst, src, strict=True):
            low = self._label(reader)
            high = self._label(source)
            while low in joined:
                low = joined[low]
            while high in joined:
                high = joined[high]
            if low == high:
                return True
            joined[low] = high
        return False

    def join(self, dst: Sequence[Key], src: Sequence[Key]) -> None:
        """For every ``i``, join the set of ``dst[i]`` with the set of ``src[i]``, for which
        :meth:`would_repeat` is false."""
        for reader, source in zip(dst, src, strict=True):
            few, many = sorted((self._set(reader), self._set(source)), key=len)
            many |= few
            for number, position in (*few, reader, source):
                self._sets.setdefault(number, {})[position] = many

    def remove(self, number: int) -> None:
        """Forget the positions of the freed row ``number``. Positions of other rows stay in their sets."""
        for position, positions in self._sets.pop(number, {}).items():
            positions.discard((number, position))
