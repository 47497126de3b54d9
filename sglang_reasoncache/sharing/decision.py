# SPDX-License-Identifier: Apache-2.0
"""A proposed block, and the rules that refuse it whatever its distance.

Nothing here looks at text or similarity: it checks what must hold for the server's memory to
stay right.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.state import Candidate, has_row, state_of


class Refusal(Enum):
    """Why a proposed block was not shared; values are metric labels."""

    WARMUP = "warmup"
    DISTANCE = "distance"
    TREE_OWNED = "tree_owned"
    NOT_WRITTEN = "not_written"
    SAME_SLOTS = "same_slots"
    """They name the same slots already, or will once other accepted blocks share."""
    PART_OF_PAGE = "part_of_page"
    OVERLAP = "overlap"
    """Source and destination overlap, or another block of the request has some of the positions."""
    TOO_YOUNG = "too_young"
    """A position would read a foreign slot before it is ``min_age`` behind the end."""
    READERS = "readers"
    """So many positions read the block's slots, or will, that moving all would take long."""
    LATE = "late"
    """The request finished, or lost its row, before the block could be shared."""
    ACROSS = "across"
    """Another request has some of the slots, too: moving would free none."""
    EVICTED = "evicted"
    """A position of the block, or of its source, was evicted."""


@dataclass(frozen=True, eq=False)
class BlockProposal:
    """Redirect positions ``[dst_start, dst_start + length)`` of ``req`` to the slots of ``[src_start, ...)``.

    All other positions with the slots of the destination move too, so these are free. Either may
    come first in the response. Positions are logical: index into prompt plus output. The slots are
    those that rows name when it shares, so a source that is itself shared resolves to the slot that
    holds its KV. ``source``: another request, whose block is read; None: the same. A proposal is void
    once the row of either is gone: ``row`` and ``source_row``.
    """

    req: Request
    candidate: Candidate
    length: int
    row: HostRow | None
    source: Request | None
    source_row: HostRow | None

    @property
    def dst_start(self) -> int:
        return self.candidate.dst_start

    @property
    def src_start(self) -> int:
        return self.candidate.src_start

    @property
    def lender(self) -> Request:
        """Whose slots are read."""
        return self.req if self.source is None else self.source

    @property
    def dst_end(self) -> int:
        return self.dst_start + self.length

    @property
    def src_end(self) -> int:
        return self.src_start + self.length


def refusal_of(block: BlockProposal, min_age: int = 0, page: int = 1) -> Refusal | None:
    """Why ``block`` must not be applied now, or None."""
    req, lender, across = block.req, block.lender, block.source is not None
    state, other = state_of(req), state_of(lender)
    if state is None or other is None or not _has_row(req, block.row):
        return Refusal.LATE
    if not _has_row(lender, block.source_row):
        return Refusal.LATE
    if block.dst_start < req.kv.cache_protected_len:
        # The prefix tree owns these; another request may read them.
        return Refusal.TREE_OWNED
    if across and block.src_start < lender.kv.cache_protected_len:
        # It may evict them when the lender has gone.
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
    if state.evicted.any_in(block.dst_start, block.dst_end) or other.evicted.any_in(
        block.src_start, block.src_end
    ):
        return Refusal.EVICTED
    return None


def _has_row(req: Request, row: HostRow | None) -> bool:
    state = state_of(req)
    return state is not None and state.row is row and has_row(req)
