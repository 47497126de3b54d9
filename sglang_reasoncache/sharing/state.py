# SPDX-License-Identifier: Apache-2.0
"""What one request carries through sharing. Lives on the request, ends with it."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sglang_reasoncache.eviction.evicted_positions import EvictedPositions
from sglang_reasoncache.filter.engine import StepEngine
from sglang_reasoncache.sharing.slot_aliases import SlotAliases

_ATTRIBUTE = "_reasoncache_state"


class Followed:
    """A request in a step engine, from opening to :meth:`close`.

    A request that is aborted while it waits to be scheduled again just
    disappears. The end of this object then leaves its id in ``orphans``, for the
    engine's own thread to close: the collector may run in any.
    """

    __slots__ = ("_engine", "_orphans", "id")

    def __init__(
        self, engine: StepEngine, start_position: int, inside: bool, orphans: deque[int]
    ) -> None:
        self._engine: StepEngine | None = None
        self._orphans = orphans
        self.id = engine.open(start_position, inside)
        self._engine = engine

    def close(self) -> None:
        """Forget the request. Called by the thread that feeds the engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close(self.id)

    def __del__(self) -> None:
        if self._engine is not None:
            self._orphans.append(self.id)


@dataclass
class RequestState:
    """Mutable, owned by the controller.

    Attributes:
        followed: The request in the step engine; None when it opted out, or nothing shares.
        served: False when it opted out: its row is never touched.
        fed: Output tokens already handed to the engine.
        row: Counts the rows this request has had; a proposal made for an earlier
            one is late.
        reapply: The row was recomputed after a retraction and holds nothing shared.
        shared: Accepted ``(dst_start, src_start)`` blocks, in order. Kept over
            a retraction, after which they are applied again.
        claimed: Starts of all blocks that passed the rules, ascending; they do not overlap.
        live_positions: Row positions less the slots that they name.
        places: Which of them name the same one.
        first_shared: Lowest redirected position, None while there is none.
        evicted positions: Evicted positions. Kept over a retraction, as the blocks are.
        next_eviction: Policy -> written positions of the row before which it is not asked again.
    """

    followed: Followed | None
    served: bool = True
    fed: int = 0
    row: int = 0
    reapply: bool = False
    shared: list[tuple[int, int]] = field(default_factory=list)
    claimed: list[int] = field(default_factory=list)
    live_positions: int = 0
    slot_aliases: SlotAliases = field(default_factory=SlotAliases)
    first_shared: int | None = None
    evicted: EvictedPositions = field(default_factory=EvictedPositions)
    next_eviction: dict[str, int] = field(default_factory=dict)

    def claim(self, start: int, length: int) -> bool:
        """Keep ``[start, start + length)`` for one block; False where another one overlaps.

        All of a request's blocks have the same length.
        """
        at = bisect.bisect_right(self.claimed, start - length)
        if at < len(self.claimed) and self.claimed[at] < start + length:
            return False
        self.claimed.insert(at, start)
        return True

    def mark_shared(self, position: int) -> None:
        if self.first_shared is None or position < self.first_shared:
            self.first_shared = position

    def forget_row(self) -> None:
        """The row is gone (finished, aborted or retracted)."""
        self.row += 1
        self.reapply = True
        self.live_positions = 0
        self.slot_aliases = SlotAliases()
        self.first_shared = None
        self.evicted.forget_row()
        self.next_eviction.clear()


def state_of(req: Any) -> RequestState | None:
    """State attached to SGLang's request, None before its first decode step."""
    return getattr(req, _ATTRIBUTE, None)


def attach(req: Any, state: RequestState) -> RequestState:
    setattr(req, _ATTRIBUTE, state)
    return state
