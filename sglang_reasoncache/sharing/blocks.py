# SPDX-License-Identifier: Apache-2.0
"""Blocks that share, or may share later."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ref

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request

#: We keep and report at most this many characters of a request's id, because clients choose ids.
MOST_OF_ID = 256


@dataclass(eq=False)
class Candidate:
    """A block of a response that reads the KV slots of another block (its source), or may read them later.

    Attributes:
        dst_start, src_start: First positions of the block and of its source.
        source: The request that the source belongs to; None if both blocks belong to the same request.
        source_rid: SGLang's id of the request ``source``, cut to ``MOST_OF_ID`` characters.
        accepted: ``AdaptiveThreshold.epoch`` when the KV distance of the two blocks was accepted; -1 if it was
            never accepted. During that epoch the distance is not judged again, even after a retraction.
        shared_at: How many positions had written KV when the block began to share; 0 if it never did. If a
            retraction had its KV computed again, the time after the retraction.
    """

    dst_start: int
    src_start: int
    source: ref[Request] | None = None
    source_rid: str = ""
    accepted: int = -1
    shared_at: int = 0

    def __post_init__(self) -> None:
        self.source_rid = self.source_rid[:MOST_OF_ID]


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
        row, lender_row: The rows of ``req`` and ``lender`` when this proposal was made. The block is refused if
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
