# SPDX-License-Identifier: Apache-2.0
"""A proposed block, and the rules that refuse it whatever its distance.

Nothing here looks at text or similarity: it checks what must hold for the server's memory to
stay right.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.state import is_running, state_of


class Refusal(Enum):
    """Why a proposed block was not shared; values are metric labels."""

    WARMUP = "warmup"
    DISTANCE = "distance"
    TREE_OWNED = "tree_owned"
    NOT_WRITTEN = "not_written"
    SAME_SLOTS = "same_slots"
    PART_OF_PAGE = "part_of_page"
    OVERLAP = "overlap"
    """Source and destination overlap, or another block of the request has some of the positions."""
    TOO_YOUNG = "too_young"
    """A position would read a foreign slot before it is ``min_age`` behind the end."""
    READERS = "readers"
    """So many positions read the block's slots already that moving all would take long."""
    LATE = "late"
    """The request finished, or lost its row, before the block could be shared."""
    EVICTED = "evicted"
    """A position of the block, or of its source, was evicted."""


@dataclass(frozen=True)
class BlockProposal:
    """Redirect positions ``[dst_start, dst_start + length)`` of ``req`` to the slots of ``[src_start, ...)``.

    All other positions with the slots of the destination move too, so these are free. Either may
    come first in the response. Positions are logical: index into prompt plus output. ``row``
    counts the request's rows: a proposal for an earlier row is void. The row is read when the
    proposal is measured, so a source that is itself shared resolves to the slot that holds its
    KV. ``decided`` blocks were accepted before a retraction and are not judged again.
    """

    req: Request
    dst_start: int
    src_start: int
    length: int
    row: int = 0
    decided: bool = False

    @property
    def dst_end(self) -> int:
        return self.dst_start + self.length

    @property
    def src_end(self) -> int:
        return self.src_start + self.length


def refusal_of(block: BlockProposal, min_age: int = 0, page: int = 1) -> Refusal | None:
    """Why ``block`` must not be applied now, or None."""
    req, state = block.req, state_of(block.req)
    # A row that is being recomputed may not even have slots yet.
    if state is None or state.row != block.row or state.reapply or not is_running(req):
        return Refusal.LATE
    if block.dst_start < req.kv.cache_protected_len:
        # The prefix tree owns these; another request may read them.
        return Refusal.TREE_OWNED
    written = written_positions(req)
    if max(block.dst_end, block.src_end) > written:
        return Refusal.NOT_WRITTEN
    if block.dst_start % page or block.src_start % page or block.length % page:
        return Refusal.PART_OF_PAGE
    if abs(block.dst_start - block.src_start) < block.length:
        return Refusal.OVERLAP
    if block.dst_end > written - min_age:
        return Refusal.TOO_YOUNG
    evicted = state.evicted
    if evicted.any_in(block.dst_start, block.dst_end) or evicted.any_in(
        block.src_start, block.src_end
    ):
        return Refusal.EVICTED
    return None
