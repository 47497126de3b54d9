# SPDX-License-Identifier: Apache-2.0
"""Which entries of one request's row are evicted or name a slot twice."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.eviction.evicted_positions import EvictedPositions


@dataclass
class RowState:
    """Of one request.

    Attributes:
        live_positions: Row positions less the slots that they name.
        slot_aliases: Which positions name the same slot.
        evicted: Evicted positions. Those of a row before a retraction are evicted again.
        next_eviction: Policy -> written positions of the row before which it does not run again.
    """

    live_positions: int = 0
    slot_aliases: SlotAliases = field(default_factory=SlotAliases)
    evicted: EvictedPositions = field(default_factory=EvictedPositions)
    next_eviction: dict[str, int] = field(default_factory=dict)

    def forget_row(self) -> None:
        """The row is gone (finished, aborted or retracted)."""
        self.live_positions = 0
        self.slot_aliases = SlotAliases()
        self.evicted.forget_row()
        self.next_eviction.clear()
