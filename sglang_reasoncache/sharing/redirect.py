# SPDX-License-Identifier: Apache-2.0
"""Redirects accepted blocks, taken from the ledger. At the positions of a redirected block, the request's row
(block table) names the slots of the source block. The block's former slots become free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_reasoncache.cache.allocator import Shared
from sglang_reasoncache.cache.host_row import HostRow, Moved, undo
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.blocks import BlockProposal
from sglang_reasoncache.sharing.request import known_record
from sglang_reasoncache.sharing.stats import SharingStats


class Redirected(NamedTuple):
    """A block that is being redirected. ``row``: the index of the request's row in ``req_to_token``."""

    block: BlockProposal
    row: int
    moves: list[Moved]

    @property
    def freed(self) -> int:
        """Slots that become free."""
        return sum(bool(move.positions) for move in self.moves)


class Redirector:
    """Redirects blocks between two forwards. Each scheduler has one redirector.

    A forward in flight may still read the old slots. SGLang may allocate these slots again at once, because
    only a later forward on the same stream can overwrite them, or a copy, which waits (``ReadsInFlight``).
    """

    def __init__(
        self,
        allocator: Shared,
        rows: ReqToTokenPool,
        stats: SharingStats,
        ranks: Ranks,
    ) -> None:
        self._allocator = allocator
        self._rows = rows
        self._stats = stats
        self._ranks = ranks

    @property
    def saved(self) -> int:
        """The number of slots that sharing saves now."""
        return self._allocator.saved

    @property
    def within(self) -> int:
        """The part of :attr:`saved` that rows save by naming one slot at several of their own positions."""
        return sum(row.saved for row in self._allocator.rows.values())

    def row_of(self, req: Request) -> HostRow:
        """The host's copy of the row of ``req``. The request must have a row in ``req_to_token``."""
        return self._allocator.row_of(req.kv.req_pool_idx)

    def begin(self) -> Redirection:
        """Begin to redirect some blocks together."""
        return Redirection(self)

    def commit(self, done: Sequence[Redirected]) -> None:
        """Write the rows of blocks that were redirected in the host's rows. If this raises, ``req_to_token``
        and reference counts are as before; with RanksTorn they are not those of other ranks."""
        write = self.prepare(done)
        # Raises on all ranks if one has failed, so either all ranks change their rows or none does.
        self._ranks.agree()
        with self._ranks.agreed():
            write()

    def prepare(self, done: Sequence[Redirected]) -> Callable[[], None]:
        """Do the work that may fail, such as allocating memory. The returned function then writes the rows and
        moves the references from the old slots to the new ones."""
        # A position may be redirected twice. ``new`` has the slot after all moves, ``old`` the slot before.
        new: dict[tuple[int, int], int] = {}
        old: dict[int, dict[int, int]] = {}
        hosts: dict[int, HostRow] = {}
        for shared in done:
            hosts[shared.row] = shared.block.rows[0]
            before = old.setdefault(shared.row, {})
            for move in shared.moves:
                for position in move.positions:
                    before.setdefault(position, move.old)
                    new[shared.row, position] = move.new
        entries = [(row, at, slot, old[row][at]) for (row, at), slot in new.items()]
        both = upload(entries, self._allocator.device)
        where = both[:, 0], both[:, 1]
        new_slots, old_slots = both[:, 2:].int().unbind(1)
        change = self._allocator.prepare_moved((hosts[row], slots) for row, slots in old.items())

        def commit() -> None:
            self._allocator.reads.freed()
            self._rows.write(where, new_slots)
            try:
                self._allocator.commit(change)
            except BaseException:
                self._rows.write(where, old_slots)
                raise

        return commit

    def count(self, shared: Redirected) -> None:
        """Note that a block shares."""
        block = shared.block
        candidate = shared.block.candidate
        stats = self._stats
        fresh = not candidate.shared_at
        record = known_record(block.req)
        if candidate not in record.copied:
            candidate.shared_at = written_positions(block.req)
        record.redirected.append(candidate)
        stats.blocks_reapplied += not fresh
        stats.blocks_shared += fresh
        stats.blocks_shared_across += block.is_across and fresh
        stats.slots_saved_total += shared.freed
        stats.slots_saved_across_total += sum(move.borrowed for move in shared.moves)


class Redirection:
    """Blocks that begin to share together, or not at all.

    Attributes:
        freed: How many slots become free.
        work: What writing them costs: 1 for a block, plus 1 for every ``block.length`` positions redirected.
    """

    def __init__(self, redirector: Redirector) -> None:
        self.freed = 0
        self.work = 0
        self._redirector = redirector
        self._done: list[Redirected] = []

    def add(self, block: BlockProposal) -> None:
        """Redirect a block that all rules allow, so far only in the host's row. If this raises, call
        :meth:`undo`."""
        moves: list[Moved] = []
        shared = Redirected(block, block.req.kv.req_pool_idx, moves)
        self._done.append(shared)
        row, lender_row = block.rows
        for run in block.runs:
            row.read(run.dst_start, run.src_start, run.length, lender_row, moves)
        self.freed += shared.freed
        self.work += 1 + sum(len(move.positions) for move in moves) // block.length

    def commit(self) -> None:
        """Write the rows, and free the slots. If this raises, call :meth:`undo`."""
        if self._done:
            self._redirector.commit(self._done)

    def count(self) -> None:
        """Note that the blocks share."""
        for shared in self._done:
            self._redirector.count(shared)

    def undo(self) -> None:
        """Restore the host's rows. Nothing was written to ``req_to_token``, or it is restored already."""
        undo(move for shared in self._done for move in shared.moves)
