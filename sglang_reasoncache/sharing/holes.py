# SPDX-License-Identifier: Apache-2.0
"""Which positions of one request were dropped."""

from __future__ import annotations

import numpy as np

from sglang_reasoncache.policies.evictor import runs
from sglang_reasoncache.sharing.decision import Drop

#: Drops of a request that the endpoint can show.
_REMEMBERED = 1024


class Holes:
    """Positions whose row entry is -1. One byte a position once anything was dropped.

    Attributes:
        count: Holes of the current row.
        first: The lowest of them, None while there is none.
        again: Runs that a row before a retraction had, to be dropped once more.
        history: ``(written, start, length)`` of the first drops: at how many written
            positions each was made.
    """

    def __init__(self) -> None:
        self._mask = np.zeros(0, dtype=bool)
        self.count = 0
        self.first: int | None = None
        self.again: list[Drop] = []
        self.history: list[tuple[int, int, int]] = []

    def any_in(self, start: int, end: int) -> bool:
        """Whether a position of ``[start, end)`` is a hole."""
        return self.count > 0 and bool(self._mask[start:end].any())

    def count_from(self, start: int) -> int:
        """Holes at ``start`` and behind it."""
        return int(np.count_nonzero(self._mask[start:])) if self.count else 0

    def add(self, drop: Drop, written: int) -> None:
        """Note a run without holes, dropped when ``written`` positions had their KV."""
        if drop.end > len(self._mask):
            grown = np.zeros(max(drop.end, 2 * len(self._mask), 256), dtype=bool)
            grown[: len(self._mask)] = self._mask
            self._mask = grown
        self._mask[drop.start : drop.end] = True
        self.count += drop.length
        if self.first is None or drop.start < self.first:
            self.first = drop.start
        if len(self.history) < _REMEMBERED:
            self.history.append((written, drop.start, drop.length))

    def held(self, written: int) -> np.ndarray:
        """int64, ascending: positions of ``[0, written)`` that are no holes."""
        kept = np.ones(written, dtype=bool)
        mask = self._mask[:written]
        kept[: len(mask)] = ~mask
        return np.flatnonzero(kept)

    def forget_row(self) -> None:
        """The row is gone; the next one starts without holes."""
        self.again += runs(np.flatnonzero(self._mask))
        self._mask[:] = False
        self.count, self.first = 0, None
