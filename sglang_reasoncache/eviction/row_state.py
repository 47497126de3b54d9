# SPDX-License-Identifier: Apache-2.0
"""Which entries of one request's row are evicted or name a slot twice."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.eviction.policies.contract import Eviction
from sglang_reasoncache.eviction.policies.evictor import runs

#: Evictions of a request that the endpoint can show.
_REMEMBERED = 1024


class EvictedPositions:
    """Positions whose row entry is -1. One byte a position once anything was evicted.

    Attributes:
        count: Evicted positions of the current row.
        first: The lowest of them, None while there is none.
        again: Runs that a row before a retraction had, to be evicted once more.
        history: ``(written, start, length)`` of the first evictions: at how many written
            positions each was made.
    """

    def __init__(self) -> None:
        self._mask = np.zeros(0, dtype=bool)
        self.count = 0
        self.first: int | None = None
        self.again: list[Eviction] = []
        self.history: list[tuple[int, int, int]] = []

    def any_in(self, start: int, end: int) -> bool:
        """Whether a position of ``[start, end)`` was evicted."""
        return self.count > 0 and bool(self._mask[start:end].any())

    def count_from(self, start: int) -> int:
        """Evicted positions at ``start`` and behind it."""
        return int(np.count_nonzero(self._mask[start:])) if self.count else 0

    def add(self, evict: Eviction, written: int) -> None:
        """Add a run of held positions, evicted when ``written`` positions had their KV."""
        if evict.end > len(self._mask):
            size = max(evict.end, 2 * len(self._mask), 256)
            self._mask = np.pad(self._mask, (0, size - len(self._mask)))
        self._mask[evict.start : evict.end] = True
        self.count += evict.length
        self.first = evict.start if self.first is None else min(self.first, evict.start)
        if len(self.history) < _REMEMBERED:
            self.history.append((written, evict.start, evict.length))

    def held(self, written: int) -> np.ndarray:
        """int64, ascending: positions of ``[0, written)`` that were not evicted."""
        kept = np.ones(written, dtype=bool)
        mask = self._mask[:written]
        kept[: len(mask)] = ~mask
        return np.flatnonzero(kept)

    def forget_row(self) -> None:
        """The row is gone; the next one starts without evicted positions."""
        self.again += runs(np.flatnonzero(self._mask))
        self._mask[:] = False
        self.count, self.first = 0, None


@dataclass
class RowState:
    """Of one request.

    Attributes:
        live_positions: Row positions less the slots that they name.
        slot_aliases: Which positions name the same slot.
        evicted: Evicted positions. Those of a row before a retraction are evicted again.
        next_eviction: Policy -> written positions of the row before which it does not run again.
    """

    live_positions: int = 0
    slot_aliases: SlotAliases = field(default_factory=SlotAliases)
    evicted: EvictedPositions = field(default_factory=EvictedPositions)
    next_eviction: dict[str, int] = field(default_factory=dict)

    def forget_row(self) -> None:
        """The row is gone (finished, aborted or retracted)."""
        self.live_positions = 0
        self.slot_aliases = SlotAliases()
        self.evicted.forget_row()
        self.next_eviction.clear()
