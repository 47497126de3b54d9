# SPDX-License-Identifier: Apache-2.0
"""A block proposed for sharing, and the rules that must allow the block before it may share.

The rules look neither at text nor at KV distances. They check that sharing keeps the KV cache consistent, and
that enough tokens follow the block.
"""

from dataclasses import dataclass
from enum import Enum

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.state import Candidate, has_row, state_of


class Refusal(Enum):
    """Why a block does not share (docs/architecture.md). The values are those of a Prometheus label."""

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
    """A proposal: positions ``[dst_start, dst_end)`` of ``req`` (the block, or *destination*) shall read the
    slots of positions ``[src_start, src_end)`` of ``lender`` (the *source*).

    Positions are indexes into the prompt followed by the output. A position *names* a slot if the request's row
    (block table) holds the slot there. Other positions of ``req`` that name a slot of the destination are
    redirected too, so the slot becomes free. The source may come before or after the destination. The source's
    slots are looked up when the block shares.

    Attributes:
        length: Number of tokens in the block.
        lender: The request whose slots would be read: ``req`` itself or another request.
        row, lender_row: The rows of ``req`` and ``lender`` when the block was proposed. The block is refused if
            either request no longer has that row.
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
        """Whether the block would read slots of a request other than ``req``."""
        return self.lender is not self.req

    @property
    def rows(self) -> tuple[HostRow, HostRow]:
        """``row`` and ``lender_row`` of a block that the rules allowed, so neither is None."""
        assert self.row is not None and self.lender_row is not None, "refused before"
        return self.row, self.lender_row

    @property
    def dst_end(self) -> int:
        return self.dst_start + self.length

    @property
    def src_end(self) -> int:
        return self.src_start + self.length


def refusal_of(block: BlockProposal, min_age: int = 0, page: int = 1) -> Refusal | None:
    """Why the rules refuse ``block`` now, or None. ``min_age`` tokens must follow it. ``page``: page size."""
    req, lender, across = block.req, block.lender, block.is_across
    if not (_has_row(req, block.row) and _has_row(lender, block.lender_row)):
        return Refusal.LATE
    row, lender_row = block.rows
    if block.dst_start < req.kv.cache_protected_len:
        # The prefix tree owns slots of the destination, so other requests may read these slots.
        return Refusal.TREE_OWNED
    if across and block.src_start < lender.kv.cache_protected_len:
        # The prefix tree owns slots of the source, and may evict them once ``lender`` no longer locks them.
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
