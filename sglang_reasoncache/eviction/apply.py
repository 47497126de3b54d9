# SPDX-License-Identifier: Apache-2.0
"""The one place that checks what an evicting policy returns, and counts what was evicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

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

    Fewer slots are freed than positions evicted where an evicted position shared its slot.
    """

    eviction_decisions: int = 0
    positions_evicted: int = 0
    slots_freed_by_eviction: int = 0
    eviction_refusals: Counter[str] = field(default_factory=Counter)


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
