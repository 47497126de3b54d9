# SPDX-License-Identifier: Apache-2.0
"""Accepted blocks that do not share yet. They share when SGLang is short of slots."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.sharing.decision import BlockProposal

#: The queue is rebuilt once it has this many more removed entries than entries of the ledger.
_DEAD = 1024


@dataclass(eq=False)
class Entry:
    """An accepted block, whose slots are located. ``distance``: between its KV and its source's."""

    block: BlockProposal
    distance: float

    @property
    def slots(self) -> int:
        """Slots that come back when the block shares."""
        return self.block.length


class Ledger:
    """Accepted blocks by distance. One per scheduler; the same on all tensor-parallel ranks.

    Attributes:
        slots: Slots that come back if every block shares.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.clear()

    def clear(self) -> None:
        self.slots = 0
        # A heap by distance, then by arrival. It may still hold removed entries.
        self._queue: list[tuple[float, int, Entry]] = []
        # ``id`` of a request -> blocks in its row, and blocks that read its row.
        self._of: dict[int, dict[Entry, None]] = {}
        self._length = 0

    def __len__(self) -> int:
        """Number of blocks."""
        return self._length

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._queue, (entry.distance, next(self._numbers), entry))
        for req in (entry.block.req, entry.block.lender):
            self._of.setdefault(id(req), {})[entry] = None
        self.slots += entry.slots
        self._length += 1

    def of(self, req: Request) -> list[Entry]:
        """Blocks in the row of ``req``, and blocks that read its row."""
        return list(self._of.get(id(req), ()))

    def slots_of(self, req: Request) -> int:
        """Slots that come back from the row of ``req`` if its blocks share."""
        return sum(entry.slots for entry in self._of.get(id(req), ()) if entry.block.req is req)

    def remove(self, entry: Entry) -> None:
        for req in {id(entry.block.req), id(entry.block.lender)}:
            entries = self._of[req]
            del entries[entry]
            if not entries:
                del self._of[req]
        self.slots -= entry.slots
        self._length -= 1
        if len(self._queue) > 2 * self._length + _DEAD:
            self._queue = [item for item in self._queue if self._has(item[2])]
            heapq.heapify(self._queue)

    def take(self) -> Entry | None:
        """Remove and return the block with the smallest distance; None if the ledger is empty."""
        while self._queue:
            entry = heapq.heappop(self._queue)[2]
            if self._has(entry):
                self.remove(entry)
                return entry
        return None

    def _has(self, entry: Entry) -> bool:
        return entry in self._of.get(id(entry.block.req), ())
