# SPDX-License-Identifier: Apache-2.0
"""Stores accepted blocks that do not share yet. :class:`BlockPipeline` decides when they share."""

import heapq
import itertools

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.sharing.blocks import BlockProposal
from sglang_reasoncache.sharing.request import known_record, record_of

#: ``Ledger._queue`` is rebuilt when the removed blocks in it outnumber the remaining ones by more than this.
_DEAD = 1024


class Ledger:
    """Accepted blocks by KV distance. Each scheduler has one ledger, equal on all tensor-parallel ranks. The
    record of a request lists the request's blocks in the ledger (``RequestRecord.in_ledger``).

    Attributes:
        slots: How many slots become free if all blocks of the ledger share.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.slots = 0
        # A heap of (distance, order of arrival, block). Removed blocks may still be in the heap.
        self._queue: list[tuple[float, int, BlockProposal]] = []
        self._length = 0

    def clear(self) -> None:
        for _, _, block in self._queue:
            known_record(block.req).in_ledger.clear()
            known_record(block.lender).in_ledger.clear()
        self.slots = 0
        self._queue = []
        self._length = 0

    def __len__(self) -> int:
        """Number of blocks."""
        return self._length

    def add(self, block: BlockProposal, distance: float) -> None:
        """Add a block after :meth:`HostRow.locate` was called for its destination and for its source."""
        heapq.heappush(self._queue, (distance, next(self._numbers), block))
        for req in (block.req, block.lender):
            known_record(req).in_ledger[block] = None
        self.slots += block.length
        self._length += 1

    def of(self, req: Request) -> list[BlockProposal]:
        """The blocks whose destination or source is in the row of ``req``."""
        record = record_of(req)
        return [] if record is None else list(record.in_ledger)

    def remove(self, block: BlockProposal) -> None:
        del known_record(block.req).in_ledger[block]
        if block.is_across:
            del known_record(block.lender).in_ledger[block]
        self.slots -= block.length
        self._length -= 1
        if len(self._queue) > 2 * self._length + _DEAD:
            self._queue = [item for item in self._queue if self._has(item[2])]
            heapq.heapify(self._queue)

    def take(self) -> BlockProposal | None:
        """Remove and return the block with the smallest distance; None if the ledger is empty."""
        while self._queue:
            block = heapq.heappop(self._queue)[2]
            if self._has(block):
                self.remove(block)
                return block
        return None

    def _has(self, block: BlockProposal) -> bool:
        return block in known_record(block.req).in_ledger
