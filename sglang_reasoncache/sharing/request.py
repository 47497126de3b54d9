# SPDX-License-Identifier: Apache-2.0
"""The one record of a request. SGLang's request carries it, so the record of a request that SGLang drops goes
with the request. ``records.py`` has the steps of a request's life."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.carriers import RECORD
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import RowState
from sglang_reasoncache.sharing.blocks import BlockProposal, Candidate, Pages
from sglang_reasoncache.sharing.group import Followed, PromptGroup
from sglang_reasoncache.sharing.merges import Merges


@dataclass(eq=False)
class RequestRecord:
    """What reasoncache stores about one request.

    Attributes:
        takes_part: Whether we may change the request's block table (:func:`takes_part`, ``custom_params.py``).
        followed: The request's registration with the filter. None if the request does not take part, sharing
            is off, or the filter process was restarted or given up.
        fed: Number of output tokens handed to the filter.
        row: Our copy of the request's row (block table). None until a poll finds the request's prefill done,
            and again from a retraction until the next such poll.
        candidates: Blocks that share or may share later, by ``dst_start``. A retraction does not remove them.
        pages: Puts whole pages together from the blocks that the filter found. None at page size 1.
        pending: Candidates that wait for their KV distance to be measured, because this row or the source's
            row is missing, a sliding window still covers the block, or SGLang has enough slots.
        in_ledger: The ledger's blocks whose destination or source is in the row, each with its order of
            arrival there. Only the ledger changes this.
        redirected: Candidates that share now, in the order in which they began to share.
        copied: Candidates that shared before a retraction, after which the request's KV was copied back. Their
            positions hold copies of their sources' KV.
        sampled: Since a retraction: positions ``[begin, end)`` of the tokens sampled behind approximate
            KV. None if there are none.
        recomputed: Such positions of retractions after which all KV was computed again, exactly.
        merges: The :class:`Merges` of the request's group, or of the request alone if it has no group.
        eviction: What evicting policies store about the request.
        steps: Number of reasoning steps whose blocks the filter looked for, as far as results were taken.
        proposed: Number of blocks that the filter proposed, alternatives included.
        refusals: How often blocks were refused, by ``Refusal``.
    """

    takes_part: bool = True
    followed: Followed | None = None
    fed: int = 0
    row: HostRow | None = None
    candidates: dict[int, Candidate] = field(default_factory=dict)
    pages: Pages | None = None
    pending: list[Candidate] = field(default_factory=list)
    in_ledger: dict[BlockProposal, int] = field(default_factory=dict)
    redirected: list[Candidate] = field(default_factory=list)
    copied: dict[Candidate, None] = field(default_factory=dict)
    sampled: tuple[int, int] | None = None
    recomputed: list[tuple[int, int]] = field(default_factory=list)
    merges: Merges = field(default_factory=Merges)
    eviction: RowState = field(default_factory=RowState)
    steps: int = 0
    proposed: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def group(self) -> PromptGroup | None:
        return None if self.followed is None else self.followed.group

    def overlaps(self, start: int, length: int) -> bool:
        """Whether a block of ``length`` tokens at ``start`` overlaps a candidate's block."""
        return any(at in self.candidates for at in range(start - length + 1, start + length))

    @property
    def approximate(self) -> list[Candidate]:
        """The candidates whose positions read, or hold a copy of, their sources' KV, in the order in which they
        began to share."""
        return list({**self.copied, **dict.fromkeys(self.redirected)})

    def unshared(self) -> tuple[int, int]:
        """How many candidates do not share: those that were accepted (in the ledger), and those whose KV
        distance was not measured, or not again since a retraction."""
        mine = self.candidates.values()
        entered = {block.candidate for block in self.in_ledger}
        accepted = sum(candidate in entered for candidate in mine)
        known = entered.union(self.redirected, self.copied)
        return accepted, sum(candidate not in known for candidate in mine)

    def lose_row(self, row: HostRow) -> None:
        """Forget the freed ``row``. All candidates wait again to be measured in the request's next row."""
        # What must not go wrong comes first, because the calls below may fail.
        mine = self.row
        self.row = None
        self.copied = dict.fromkeys(self.approximate)
        self.redirected = []
        self.pending = list(self.candidates.values())
        if mine is not None:
            self.merges.remove(mine.number)
        self.eviction.lose_row(row)


def record_of(req: Request) -> RequestRecord | None:
    """The record of SGLang's request. None if no poll has seen the request yet."""
    return getattr(req, RECORD, None)


def known_record(req: Request) -> RequestRecord:
    """The record of a request that proposes blocks or is the source of a block, and so has one."""
    record = record_of(req)
    assert record is not None, "only requests with a record propose blocks, or are their source"
    return record


def is_running(req: Request) -> bool:
    return not req.finished() and not req.is_retracted and req.kv.holds_kv


def has_row(req: Request) -> bool:
    """Whether the request runs and its record has a ``row``. A retracted request has none until a poll finds
    its prefill done again; before that, some positions may have no slots."""
    record = record_of(req)
    return record is not None and record.row is not None and is_running(req)
