# SPDX-License-Identifier: Apache-2.0
"""Redirects the rows of blocks that were accepted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sglang_reasoncache.cache.allocator import SharedPagedAllocator, SharedTokenAllocator
from sglang_reasoncache.cache.slot_names import SlotNames
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.sharing.measure import BlockMeter


class Redirection(NamedTuple):
    """A position of a row, the slot that it names, the one that it will name, and one of the
    positions that name that already, with its row."""

    row: int
    position: int
    old_slot: int
    new_slot: int
    source: int
    source_row: int


class Acceptor:
    """Shares slots between two forwards.

    A batch in flight may still read the old slots: they are only overwritten by
    a later forward on the same stream. The freed slots can be handed out at once.
    With ``copies`` it copies instead of redirecting (verification).

    Attributes:
        planned: Row and position -> the slot that it will name once what is planned is done.
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
        self.planned: dict[tuple[int, int], int] = {}

    @property
    def saved(self) -> int:
        """Slots that the rows do without."""
        return self._allocator.saved

    def locate(self, req: Request, start: int, slots: Sequence[int]) -> None:
        """Consecutive positions of a row were found in ``slots`` when they were measured."""
        self._allocator.names_in(req.kv.req_pool_idx).locate(start, slots)

    def slots(self, req: Request, start: int, length: int) -> list[int]:
        """Of consecutive positions, located before, with what is planned."""
        row = req.kv.req_pool_idx
        now = self._allocator.names_in(row).between(start, start + length).tolist()
        return [self.planned.get((row, start + i), slot) for i, slot in enumerate(now)]

    def plan(self, redirections: Sequence[Redirection]) -> None:
        self.planned.update(((e.row, e.position), e.new_slot) for e in redirections)

    def prepare(self, redirections: Sequence[Redirection]) -> Callable[[], None]:
        """All that can fail of redirecting (or copying) whole pages, in this order; a position may
        come more than once. The function returned does the rest."""
        # Of a position only the last new slot is written, and the first old one was there.
        new: dict[tuple[int, int], int] = {}
        old: dict[tuple[int, int], int] = {}
        for row, position, old_slot, new_slot, *_ in redirections:
            old.setdefault((row, position), old_slot)
            new[row, position] = new_slot
        entries = [(*at, slot, old[at]) for at, slot in new.items()]
        both = upload(entries, self._allocator.device)
        where = both[:, 0], both[:, 1]
        if self.copies:
            return functools.partial(self._meter.copy, *where, both[:, 2])
        new_slots, old_slots = both[:, 2:].int().unbind(1)
        pages = [e for e in redirections if e.position % self.page == 0]
        change = self._allocator.prepare(
            [entry.old_slot // self.page for entry in pages],
            [entry.new_slot // self.page for entry in pages],
        )
        by_row: dict[int, list[tuple[int, int]]] = {}
        for entry in redirections:
            by_row.setdefault(entry.row, []).append((entry.position, entry.new_slot))
            by_row.setdefault(entry.source_row, []).append((entry.source, entry.new_slot))
        named = [self._named(row, entries) for row, entries in by_row.items()]

        def redirect() -> None:
            self._pool.write(where, new_slots)
            try:
                self._allocator.commit(change)
            except BaseException:
                self._pool.write(where, old_slots)
                raise
            for names, positions, slots in named:
                names.set(positions, slots)

        return redirect

    def _named(
        self, row: int, entries: Sequence[tuple[int, int]]
    ) -> tuple[SlotNames, np.ndarray, np.ndarray]:
        """Positions of a row, those redirected and those read, and the slots that they will have."""
        positions, slots = np.array(entries, dtype=np.int64).T
        return self._allocator.names_in(row, int(positions.max()) + 1), positions, slots
