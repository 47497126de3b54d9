# SPDX-License-Identifier: Apache-2.0
"""The one place that checks what an evicting policy returns, and evicts positions of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.eviction.policies.contract import Eviction
from sglang_reasoncache.eviction.row_state import EvictedPositions


class EvictionRefusal(Enum):
    """Why a proposed eviction was not applied; values are metric labels."""

    MALFORMED = "malformed"
    """Not a run of positions."""
    TREE_OWNED = "tree_owned"
    NOT_WRITTEN = "not_written"
    NEWEST = "newest"
    """The newest position stays: the next forward reads its slot to place the one after it."""
    PART_OF_PAGE = "part_of_page"
    ALREADY_EVICTED = "already_evicted"
    POLICY_FAILED = "policy_failed"
    """The policy raised an exception."""


@dataclass
class EvictionStats:
    """Totals since start or the last flush.

    ``slots_freed_by_eviction`` is less than ``positions_evicted`` where an evicted position
    shared its slot.
    """

    eviction_decisions: int = 0
    positions_evicted: int = 0
    slots_freed_by_eviction: int = 0
    eviction_refusals: Counter[str] = field(default_factory=Counter)


class Evicted(NamedTuple):
    """Evicted positions, and slots that came back: fewer where other positions name them."""

    positions: int
    freed: int

    def __add__(self, other: tuple[Any, ...]) -> Evicted:
        return Evicted(self.positions + other[0], self.freed + other[1])


class PageEvictor(Protocol):
    """What of our slot allocators is needed here."""

    page_size: int

    def evict(self, pages: torch.Tensor) -> int: ...


def refusal_of_eviction(
    evict: object, owned: int, written: int, page: int, evicted: EvictedPositions
) -> EvictionRefusal | None:
    """Why ``evict`` must not be applied, or None. It may be anything a policy returned.

    Args:
        owned: First position that may be evicted.
        written: Positions whose KV is surely in the pool.
        page: Positions per page.
        evicted: Evicted positions of the request.
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


class EvictionApplier:
    """Evicts positions between two forwards.

    A batch in flight reads the old slots or finds the positions evicted. Either is right:
    freed slots are only overwritten by a later forward on the same stream.

    Args:
        allocator: Ours, with reference counts.
        req_to_token_pool: SGLang's rows.
    """

    def __init__(self, allocator: PageEvictor, req_to_token_pool: ReqToTokenPool) -> None:
        self._allocator = allocator
        self._pool = req_to_token_pool

    def apply(
        self,
        req: Request,
        evicted: EvictedPositions,
        evictions: Iterable[Eviction | None],
        written: int,
        stats: EvictionStats,
        first: int = 0,
    ) -> Evicted:
        """Evict what is allowed of ``evictions`` and give up the references of its slots.

        Other references to the same slots, a shared block's, keep them alive.

        Args:
            req: Holds its row.
            evicted: Of the request; grows by what is applied.
            written: Positions whose KV is surely in the pool.
            stats: Counts what was evicted, and refusals by their value.
            first: No position before it, even if the request owns it.
        """
        first = max(first, req.kv.cache_protected_len)
        page = self._allocator.page_size
        parts = []
        for evict in evictions:
            refusal = refusal_of_eviction(evict, first, written, page, evicted)
            if refusal is not None:
                stats.eviction_refusals[refusal.value] += 1
                continue
            assert evict is not None, "refused as malformed"
            evicted.add(evict, written)
            parts.append(np.arange(evict.start, evict.end))
        if not parts:
            return Evicted(0, 0)
        positions = np.concatenate(parts)
        rows = self._pool.req_to_token
        at = upload(positions, rows.device)
        slots = rows[req.kv.req_pool_idx, at]
        self._pool.write((req.kv.req_pool_idx, at), torch.full_like(slots, -1))
        done = Evicted(len(positions), self._allocator.evict(slots[::page].long() // page))
        stats.positions_evicted += done.positions
        stats.slots_freed_by_eviction += done.freed
        return done
