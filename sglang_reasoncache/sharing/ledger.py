# SPDX-License-Identifier: Apache-2.0
"""Blocks that can share and do not yet: memory that SGLang gets back when it is short of it."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.sharing.decision import BlockProposal

#: Entries that have left and are still in the queue, beyond as many as are there.
_DEAD = 1024


@dataclass(eq=False)
class Entry:
    """A block whose slots are located. ``distance``: of its KV to that of its source."""

    block: BlockProposal
    distance: float

    @property
    def slots(self) -> int:
        """How many come back when it shares."""
        return self.block.length


class Ledger:
    """One per scheduler; the same on all tensor-parallel ranks.

    Attributes:
        slots: How many come back if every block shares.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.clear()

    def clear(self) -> None:
        self.slots = 0
        # By distance, then in the order of arrival.
        self._queue: list[tuple[float, int, Entry]] = []
        # ``id`` of a request -> entries in its row, or that read its row.
        self._of: dict[int, dict[Entry, None]] = {}
        self._length = 0

    def __len__(self) -> int:
        """Blocks."""
        return self._length

    def add(self, entry: Entry) -> None:
        heapq.heappush(self._queue, (entry.distance, next(self._numbers), entry))
        for req in (entry.block.req, entry.block.lender):
            self._of.setdefault(id(req), {})[entry] = None
        self.slots += entry.slots
        self._length += 1

    def of(self, req: Request) -> list[Entry]:
        """Entries in the row of ``req``, or that read its row."""
        return list(self._of.get(id(req), ()))

    def slots_of(self, req: Request) -> int:
        """How many come back from its row."""
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
        """Remove the block with the smallest distance."""
        while self._queue:
            entry = heapq.heappop(self._queue)[2]
            if self._has(entry):
                self.remove(entry)
                return entry
        return None

    def _has(self, entry: Entry) -> bool:
        return entry in self._of.get(id(entry.block.req), ())
