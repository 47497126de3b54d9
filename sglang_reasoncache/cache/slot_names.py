# SPDX-License-Identifier: Apache-2.0
"""What the host knows of a row's entries, so that freeing them needs no look at the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EVICTED = -1


def grown(of_positions: np.ndarray, end: int) -> np.ndarray:
    """The same array, or a copy with zeros behind it, that has an element for each position before
    ``end``."""
    size = len(of_positions)
    if end <= size:
        return of_positions
    return np.pad(of_positions, (0, max(end, 2 * size, 256) - size))


class SlotNames:
    """The slot of every position that is known, among them all that share one, ``EVICTED`` where there
    is none any more, and 0, a slot of nobody, where the row has the only reference."""

    def __init__(self) -> None:
        self._slots = np.zeros(0, dtype=np.int64)

    def set(
        self, positions: Sequence[int] | np.ndarray, slots: Sequence[int] | np.ndarray | int
    ) -> None:
        """Of a position that comes more than once the last slot counts."""
        at = np.asarray(positions, dtype=np.int64)
        self.reserve(int(at.max(initial=-1)) + 1)
        self._slots[at] = slots

    def locate(self, start: int, slots: Sequence[int]) -> None:
        """Slots that consecutive positions had when nothing was known of them."""
        self.reserve(start + len(slots))
        known = self._slots[start : start + len(slots)]
        known[known == 0] = np.asarray(slots, dtype=np.int64)[known == 0]

    def reserve(self, end: int) -> None:
        """Have memory for positions before ``end``."""
        self._slots = grown(self._slots, end)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """int64, as long as ``positions``."""
        found, known = np.zeros(len(positions), dtype=np.int64), positions < len(self._slots)
        found[known] = self._slots[positions[known]]
        return found

    def between(self, start: int, end: int) -> np.ndarray:
        """Of consecutive positions."""
        found, known = np.zeros(end - start, dtype=np.int64), self._slots[start:end]
        found[: len(known)] = known
        return found
