# SPDX-License-Identifier: Apache-2.0
"""Which positions of one request have their KV in the same slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sglang_reasoncache.cache.slot_names import grown


class SlotAliases:
    """A number for each position, equal where a row names the same slot twice: the position whose
    slot it was first, which may name another slot by now, or be evicted. Below 0: another row's."""

    def __init__(self) -> None:
        self._of = np.zeros(0, dtype=np.int64)
        # Number -> all positions with it, where there are several.
        self._positions: dict[int, list[int]] = {}

    def redirect(self, dst: int, src: int, length: int) -> list[tuple[int, int]]:
        """Positions from ``dst`` on now have the slots of those from ``src`` on.

        All that had the slots of the destination move with it. Returns every position that
        moved, with the offset in ``[0, length)`` of the slot it has now.
        """
        self._reserve(max(dst, src) + length)
        moved = []
        for offset in range(length):
            going = self._move(dst + offset, int(self._of[src + offset]))
            moved += [(position, offset) for position in going]
        return moved

    def assign(self, dst: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Likewise, with ``numbers`` of slots of another row."""
        self._reserve(dst + len(numbers))
        moves = [(self._move(dst + offset, new), offset) for offset, new in enumerate(numbers)]
        return [(position, offset) for going, offset in moves for position in going]

    def _reserve(self, end: int) -> None:
        size, self._of = len(self._of), grown(self._of, end)
        self._of[size:] = np.arange(size, len(self._of))

    def _move(self, at: int, new: int) -> list[int]:
        """All positions with the number of this one now have ``new``."""
        old = int(self._of[at])
        if old == new:
            return []
        going = self._positions.pop(old, [old])
        self._positions.setdefault(new, [new] if new >= 0 else []).extend(going)
        self._of[going] = new
        return going

    def first(self, numbers: Iterable[int], default: int) -> int:
        """The lowest position with one of ``numbers``."""
        named = (at for n in numbers for at in self._positions.get(n, (n,)) if at >= 0)
        return min(named, default=default)

    def most(self, start: int, length: int) -> int:
        """Positions with the slot of one of these that most positions have."""
        return max(len(self._positions.get(n, (n,))) for n in self.numbers(start, length))

    def of(self, positions: np.ndarray) -> np.ndarray:
        """int64, as long as ``positions``, which ascend."""
        known = int(np.searchsorted(positions, len(self._of)))
        return np.concatenate((self._of[positions[:known]], positions[known:]))

    def numbers(self, start: int, length: int) -> list[int]:
        """Of consecutive positions."""
        return self.of(np.arange(start, start + length)).tolist()
