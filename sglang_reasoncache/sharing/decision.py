# SPDX-License-Identifier: Apache-2.0
"""Plain data between the filter, which proposes blocks, and the acceptor, which applies them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_reasoncache.compat.types import Request


class Refusal(Enum):
    """Why a proposed block was not shared; values are metric labels."""

    WARMUP = "warmup"
    DISTANCE = "distance"
    TREE_OWNED = "tree_owned"
    NOT_WRITTEN = "not_written"
    SAME_SLOTS = "same_slots"
    OVERLAP = "overlap"
    """Another block of the request has some of the positions."""
    LATE = "late"
    """The request finished, or lost its row, before the block could be shared."""
    EVICTED = "evicted"
    """A position of the block, or of its source, was evicted."""


@dataclass(frozen=True)
class BlockProposal:
    """Redirect positions ``[dst_start, dst_start + length)`` of ``req`` to the slots of ``[src_start, ...)``.

    Positions are logical: index into prompt plus output. ``req`` is SGLang's
    request and ``row`` counts its rows: a proposal for an earlier row is void.
    The row is read when the proposal is measured, so a source that is itself
    shared resolves to the slot that holds its KV. ``decided`` blocks were
    accepted before a retraction and are not judged again.
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
