# SPDX-License-Identifier: Apache-2.0
"""Which positions of one request are evicted, and which may be.

The one place that checks what an evicting policy returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.held import Reads
from sglang_reasoncache.eviction.policies.contract import Eviction, RequestView
from sglang_reasoncache.eviction.policies.evictor import runs

#: Evictions of a request that the endpoint can show.
_REMEMBERED = 1024


def written_positions(req: Request) -> int:
    """Positions whose KV is there: all but the newest token's, which the next forward writes."""
    return min(len(req.origin_input_ids) + len(req.output_ids) - 1, req.kv.kv_allocated_len)


class EvictionRefusal(Enum):
    """Why a proposed eviction was not applied; values are metric labels."""

    MALFORMED = "malformed"  # not a run of positions
    TREE_OWNED = "tree_owned"
    NOT_WRITTEN = "not_written"
    NEWEST = "newest"  # it stays: the next forward reads its slot to place the one after it
    PART_OF_PAGE = "part_of_page"
    ALREADY_EVICTED = "already_evicted"
    POLICY_FAILED = "policy_failed"  # it raised an exception


@dataclass
class EvictionStats:
    """Totals since start or the last flush; an evicted position that shared its slot frees none."""

    eviction_decisions: int = 0
    positions_evicted: int = 0
    slots_freed_by_eviction: int = 0
    eviction_refusals: Counter[str] = field(default_factory=Counter)


class EvictedPositions:
    """Positions whose row entry is -1. One byte a position once anything was evicted.

    Attributes:
        count: Evicted positions of the current row.
        first: The lowest of them, None while there is none.
        again: Runs that a row before a retraction had, to be evicted once more.
        history: ``(written, start, length)`` of the first evictions.
    """

    def __init__(self) -> None:
        self._mask = np.zeros(0, dtype=bool)
        self.count = 0
        self.first: int | None = None
        self.again: list[Eviction] = []
        self.history: list[tuple[int, int, int]] = []

    def any_in(self, start: int, end: int) -> bool:
        """Whether a position of ``[start, end)`` was evicted."""
        return self.count > 0 and bool(self._mask[start:end].any())

    def count_from(self, start: int) -> int:
        """Evicted positions at ``start`` and behind it."""
        return int(np.count_nonzero(self._mask[start:])) if self.count else 0

    def add(self, evict: Eviction, written: int) -> None:
        """Add a run of held positions, evicted when ``written`` positions had their KV."""
        self.reserve(evict.end)
        self._mask[evict.start : evict.end] = True
        self.count += evict.length
        self.first = evict.start if self.first is None else min(self.first, evict.start)
        if len(self.history) < _REMEMBERED:
            self.history.append((written, evict.start, evict.length))

    def reserve(self, end: int) -> None:
        """Have memory for positions before ``end``."""
        size = len(self._mask)
        if end > size:
            self._mask = np.pad(self._mask, (0, max(end, 2 * size, 256) - size))

    def held(self, written: int) -> np.ndarray:
        """int64, ascending: positions of ``[0, written)`` that were not evicted."""
        kept = np.ones(written, dtype=bool)
        mask = self._mask[:written]
        kept[: len(mask)] = ~mask
        return np.flatnonzero(kept)

    def forget_row(self) -> None:
        """The row is gone; the next one starts without evicted positions."""
        try:
            self.again += runs(np.flatnonzero(self._mask))
        finally:
            self._mask[:] = False
            self.count, self.first = 0, None


def refusal_of_eviction(
    evict: object, owned: int, written: int, page: int, evicted: EvictedPositions
) -> EvictionRefusal | None:
    """Why ``evict`` must not be applied, or None. It may be anything a policy returned.

    Args:
        owned: First position that may be evicted.
        written: Positions whose KV is surely in the pool.
    """
    if (
        not isinstance(evict, Eviction)
        or type(evict.start) is not int
        or type(evict.length) is not int
        or evict.start < 0
        or evict.length < 1
    ):
        return EvictionRefusal.MALFORMED
    if evict.start < owned:
        return EvictionRefusal.TREE_OWNED
    if evict.end > written:
        return EvictionRefusal.NOT_WRITTEN
    if evict.end == written:
        return EvictionRefusal.NEWEST
    if evict.start % page or evict.length % page:
        return EvictionRefusal.PART_OF_PAGE
    if evicted.any_in(evict.start, evict.end):
        return EvictionRefusal.ALREADY_EVICTED
    return None


class Asked(NamedTuple):
    """A decision of a policy that waits for what it reads of a GPU."""

    view: RequestView
    excess: int
    reads: Reads


@dataclass
class RowState:
    """Of one request."""

    evicted: EvictedPositions = field(default_factory=EvictedPositions)
    #: Policy -> written positions of the row before which it does not run again.
    next_eviction: dict[str, int] = field(default_factory=dict)
    #: Policy -> what it was asked.
    asked: dict[str, Asked] = field(default_factory=dict)

    def forget_row(self) -> None:
        """The row is gone (finished, aborted or retracted)."""
        self.next_eviction.clear()
        self.asked.clear()
        self.evicted.forget_row()
