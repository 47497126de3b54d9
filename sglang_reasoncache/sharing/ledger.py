# SPDX-License-Identifier: Apache-2.0
"""Stores accepted blocks that do not share yet. :class:`BlockPipeline` decides when they share."""

import heapq
import itertools

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.sharing.blocks import BlockProposal
from sglang_reasoncache.sharing.request import known_record, record_of

#: ``Ledger._queue`` is rebuilt when its entries of removed blocks outnumber the others by more than this.
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
        # The blocks by order of arrival.
        self._blocks: dict[int, BlockProposal] = {}
        # A heap of (distance, order of arrival). Removed blocks may still have entries, so an entry does not
        # refer to the block: it would keep an ended request, and copies of its rows, alive.
        self._queue: list[tuple[float, int]] = []

    def clear(self) -> None:
        for block in self._blocks.values():
            known_record(block.req).in_ledger.clear()
            known_record(block.lender).in_ledger.clear()
        self.slots = 0
        self._blocks = {}
        self._queue = []

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    def add(self, block: BlockProposal, distance: float) -> None:
        """Add a block after :meth:`HostRow.locate` was called for its destination and for its source."""
        number = next(self._numbers)
        heapq.heappush(self._queue, (distance, number))
        self._blocks[number] = block
        for req in (block.req, block.lender):
            known_record(req).in_ledger[block] = number
        self.slots += block.length

    def of(self, req: Request) -> list[BlockProposal]:
        """The blocks whose destination or source is in the row of ``req``."""
        record = record_of(req)
        return [] if record is None else list(record.in_ledger)

    def remove(self, block: BlockProposal) -> None:
        number = known_record(block.req).in_ledger.pop(block)
        if block.is_across:
            del known_record(block.lender).in_ledger[block]
        del self._blocks[number]
        self.slots -= block.length
        if len(self._queue) > 2 * len(self._blocks) + _DEAD:
            self._queue = [entry for entry in self._queue if entry[1] in self._blocks]
            heapq.heapify(self._queue)

    def take(self) -> BlockProposal | None:
        """Remove and return the block with the smallest distance; None if the ledger is empty."""
        while self._queue:
            _, number = heapq.heappop(self._queue)
            block = self._blocks.get(number)
            if block is not None:
                self.remove(block)
                return block
        return None
