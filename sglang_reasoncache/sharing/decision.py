# SPDX-License-Identifier: Apache-2.0
"""A block proposed for sharing, and the rules that may refuse it, however small its KV distance is.

The rules do not look at text or similarity. They check what must hold so that the server's memory stays
correct, and that the block is old enough.
"""

from dataclasses import dataclass
from enum import Enum

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.state import Candidate, has_row, state_of


class Refusal(Enum):
    """Why a proposed block was not shared (docs/architecture.md). The values label a Prometheus series."""

    WARMUP = "warmup"
    DISTANCE = "distance"
    TREE_OWNED = "tree_owned"
    NOT_WRITTEN = "not_written"
    SAME_SLOTS = "same_slots"
    PART_OF_PAGE = "part_of_page"
    OVERLAP = "overlap"
    TOO_YOUNG = "too_young"
    READERS = "readers"
    LATE = "late"
    ACROSS = "across"
    IN_WINDOW = "in_window"
    EVICTED = "evicted"


@dataclass(frozen=True, eq=False)
class BlockProposal:
    """Redirect ``[dst_start, dst_end)`` of ``req`` to the slots of ``[src_start, src_end)`` of ``lender``.

    Positions are indexes into prompt plus output; either block may come first. A position *names* the slot in
    its entry of the request's row (block table). Every other position that names a slot of the destination is
    redirected too, so the destination's slots become free. Slots are looked up when the block shares: if the
    source was redirected meanwhile, the destination reads the slots that the source then names.

    Attributes:
        length: Tokens.
        row: The row of ``req`` when the block was proposed. If ``req`` no longer has it, the block is refused.
        lender: The request whose slots are read, ``req`` itself or another request.
        lender_row: The row of ``lender`` when the block was proposed. If ``lender`` no longer has it, the block
            is refused.
    """

    req: Request
    candidate: Candidate
    length: int
    row: HostRow | None
    lender: Request
    lender_row: HostRow | None

    @property
    def dst_start(self) -> int:
        return self.candidate.dst_start

    @property
    def src_start(self) -> int:
        return self.candidate.src_start

    @property
    def is_across(self) -> bool:
        """Whether another request's slots are read."""
        return self.lender is not self.req

    @property
    def rows(self) -> tuple[HostRow, HostRow]:
        """Both rows of a block that the rules allow."""
        assert self.row is not None and self.lender_row is not None, "refused before"
        return self.row, self.lender_row

    @property
    def dst_end(self) -> int:
        return self.dst_start + self.length

    @property
    def src_end(self) -> int:
        return self.src_start + self.length


def refusal_of(block: BlockProposal, min_age: int = 0, page: int = 1) -> Refusal | None:
    """Why ``block`` must not share now, or None. ``min_age``: tokens; ``page``: tokens of a page."""
    req, lender, across = block.req, block.lender, block.is_across
    if not (_has_row(req, block.row) and _has_row(lender, block.lender_row)):
        return Refusal.LATE
    row, lender_row = block.rows
    if block.dst_start < req.kv.cache_protected_len:
        # The prefix tree owns the destination; another request may read it.
        return Refusal.TREE_OWNED
    if across and block.src_start < lender.kv.cache_protected_len:
        # The prefix tree owns the source and may evict it once the lender is gone.
        return Refusal.TREE_OWNED
    written, there = written_positions(req), written_positions(lender)
    if block.dst_end > written or block.src_end > there:
        return Refusal.NOT_WRITTEN
    if block.dst_start % page or block.src_start % page or block.length % page:
        return Refusal.PART_OF_PAGE
    if not across and abs(block.dst_start - block.src_start) < block.length:
        return Refusal.OVERLAP
    if block.dst_end > written - min_age or (across and block.src_end > there - min_age):
        return Refusal.TOO_YOUNG
    evicted = row.any_evicted(block.dst_start, block.dst_end)
    if evicted or lender_row.any_evicted(block.src_start, block.src_end):
        return Refusal.EVICTED
    return None


def _has_row(req: Request, row: HostRow | None) -> bool:
    state = state_of(req)
    return state is not None and state.row is row and has_row(req)
