# SPDX-License-Identifier: Apache-2.0
"""Redirects the rows of blocks that were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_reasoncache.cache.allocator import SharedPagedAllocator, SharedTokenAllocator
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import ReqToTokenPool
from sglang_reasoncache.sharing.measure import BlockMeter


class Redirection(NamedTuple):
    """A position of a row, the slot that it names, the one that it will name, and one of the
    positions that name that already."""

    row: int
    position: int
    old_slot: int
    new_slot: int
    source: int


class Acceptor:
    """Shares slots between two forwards.

    A batch in flight may still read the old slots: they are only overwritten by
    a later forward on the same stream. The freed slots can be handed out at once.
    With ``copies`` it copies instead of redirecting (verification).
    """

    def __init__(
        self,
        allocator: SharedTokenAllocator | SharedPagedAllocator,
        req_to_token_pool: ReqToTokenPool,
        meter: BlockMeter,
        copies: bool,
    ) -> None:
        self._allocator, self._pool, self._meter = allocator, req_to_token_pool, meter
        self.copies, self.page = copies, allocator.page_size

    def apply(self, redirections: Sequence[Redirection]) -> None:
        """Redirect (or copy) whole pages, in this order; a position may come more than once."""
        # Of a position only the last one is written.
        last = {(entry.row, entry.position): entry.new_slot for entry in redirections}
        if not last:
            return
        device, page = self._allocator.device, self.page
        rows, positions, slots = upload(
            [(row, position, slot) for (row, position), slot in last.items()], device
        ).unbind(1)
        if self.copies:
            self._meter.copy(rows, positions, slots)
            return
        starts = [entry for entry in redirections if entry.position % page == 0]
        # References first: a source must never be free in between.
        self._allocator.share([entry.new_slot // page for entry in starts])
        self._pool.write((rows, positions), slots.int())
        for row in {entry.row for entry in redirections}:
            moved = [entry for entry in redirections if entry.row == row]
            at = [position for entry in moved for position in (entry.position, entry.source)]
            self._allocator.name(row, at, [entry.new_slot for entry in moved for _ in range(2)])
        self._allocator.release([entry.old_slot // page for entry in starts])
