# SPDX-License-Identifier: Apache-2.0
"""Counts of what evicting policies did."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass
class EvictionStats:
    """Totals since start or the last flush.

    ``slots_freed_by_eviction`` is less than ``positions_evicted`` where an evicted position
    shared its slot.
    """

    eviction_decisions: int = 0
    positions_evicted: int = 0
    slots_freed_by_eviction: int = 0
    eviction_refusals: collections.Counter[str] = field(default_factory=collections.Counter)
