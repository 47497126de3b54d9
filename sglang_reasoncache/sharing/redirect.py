# SPDX-License-Identifier: Apache-2.0
"""Redirects accepted blocks, taken from the ledger. At the positions of a redirected block, the request's row
(block table) names the slots of the source block. The block's former slots become free."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import Shared
from sglang_reasoncache.cache.host_row import HostRow, Moved, undo
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal, refusal_of
from sglang_reasoncache.sharing.ledger import Ledger
from sglang_reasoncache.sharing.state import state_of
from sglang_reasoncache.sharing.stats import SharingStats

#: Bounds the work of one ``share``: a block counts 1, plus 1 for every ``block.length`` positions redirected.
_MAX_BATCH = 256


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
    only a later forward on the same stream can overwrite them. ``min_age``: how many tokens of the response
    must follow a block before the block may share.
    """

    def __init__(
        self,
        allocator: Shared,
        rows: ReqToTokenPool,
        stats: SharingStats,
        ranks: Ranks,
        min_age: int = 0,
    ) -> None:
        self._allocator, self._rows, self._stats, self._ranks = allocator, rows, stats, ranks
        self._min_age, self.page = min_age, allocator.page_size

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

    def share(self, ledger: Ledger, wanted: float) -> list[tuple[BlockProposal, Refusal]]:
        """Take blocks from ``ledger``, the smallest distance first, and redirect them, until ``wanted`` slots
        became free, ``_MAX_BATCH`` is reached or no block is left. Returns the taken blocks that can no longer
        share, with the reasons. If this raises, rows and reference counts are as before."""
        done, refused = list[Redirected](), list[tuple[BlockProposal, Refusal]]()
        freed = moved = 0
        try:
            while freed < wanted and moved < _MAX_BATCH:
                block = ledger.take()
                if block is None:
                    break
                refusal = self.refusal_of(block) or self.refusal_of_slots(block)
                if refusal is not None:
                    refused.append((block, refusal))
                    continue
                moves = list[Moved]()
                done.append(Redirected(block, block.req.kv.req_pool_idx, moves))
                row, lender = block.rows
                row.read(block.dst_start, block.src_start, block.length, lender, moves)
                freed += done[-1].freed
                moved += 1 + sum(len(move.positions) for move in moves) // block.length
            if done:
                commit = self.prepare(done)
                # Raises on all ranks if one has failed, so either all ranks change their rows or none does.
                self._ranks.agree()
                commit()
        except BaseException:
            undo(move for shared in done for move in shared.moves)
            raise
        for shared in done:
            self._count(shared)
        return refused

    def refusal_of(self, block: BlockProposal) -> Refusal | None:
        """Why the rules refuse the block now, or None if they allow it."""
        refusal = refusal_of(block, self._min_age, self.page)
        if refusal is None and self._allocator.has_window_pool:
            start, end = compat.freed_of_window(block.req.kv, self.page)
            # Positions in the window need their own window-pool slots: a shared one would be freed too early.
            if not start <= block.dst_start < block.dst_end <= end:
                return Refusal.IN_WINDOW
        return refusal

    def refusal_of_slots(self, block: BlockProposal) -> Refusal | None:
        """Why the slots of a block that the rules allow must not be shared now, or None. :meth:`HostRow.locate`
        must have been called for the block and for its source."""
        row, lender = block.rows
        read = range(block.src_start, block.src_end)
        if block.is_across:
            owned = block.lender.kv.cache_protected_len
            if any(at < owned for position in read for at in lender.readers(position)):
                return Refusal.TREE_OWNED
        slots = row.between(block.dst_start, block.dst_end).tolist()
        if slots == lender.between(block.src_start, block.src_end).tolist():
            return Refusal.SAME_SLOTS
        return None if row.in_other_rows.isdisjoint(slots) else Refusal.ACROSS

    def prepare(self, done: Sequence[Redirected]) -> Callable[[], None]:
        """Do the work that may fail, such as allocating memory. The returned function then writes the rows and
        moves the references from the old slots to the new ones."""
        # A position may be redirected twice. ``new`` has the slot after all moves, ``old`` the slot before.
        new: dict[tuple[int, int], int] = {}
        old: dict[tuple[int, int], int] = {}
        lost, gained = list[int](), list[int]()
        for shared in done:
            for move in shared.moves:
                for position in move.positions:
                    at = shared.row, position
                    old.setdefault(at, move.old)
                    new[at] = move.new
                    if position % self.page == 0:
                        lost.append(move.old // self.page)
                        gained.append(move.new // self.page)
        entries = [(*at, slot, old[at]) for at, slot in new.items()]
        both = upload(entries, self._allocator.device)
        where = both[:, 0], both[:, 1]
        new_slots, old_slots = both[:, 2:].int().unbind(1)
        change = self._allocator.prepare(lost, gained)

        def commit() -> None:
            self._rows.write(where, new_slots)
            try:
                self._allocator.commit(change)
            except BaseException:
                self._rows.write(where, old_slots)
                raise

        return commit

    def _count(self, shared: Redirected) -> None:
        block, candidate, stats = shared.block, shared.block.candidate, self._stats
        state = state_of(block.req)
        assert state is not None, "a block shares in a row that is followed"
        fresh = not candidate.shared_at
        candidate.shared_at = written_positions(block.req)
        state.redirected.append(candidate)
        stats.blocks_reapplied += not fresh
        stats.blocks_shared += fresh
        stats.blocks_shared_across += block.is_across and fresh
        stats.slots_saved_total += shared.freed
        stats.slots_saved_across_total += sum(move.borrowed for move in shared.moves)
