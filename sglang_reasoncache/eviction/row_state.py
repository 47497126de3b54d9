# SPDX-License-Identifier: Apache-2.0
"""Which entries of one request's row are evicted or name a slot twice, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.cache.slot_names import grown
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.decision import Decision
from sglang_reasoncache.eviction.policies.evictor import runs

#: Evictions of a request that the endpoint can show.
_REMEMBERED = 1024


def written_positions(req: Request) -> int:
    """Positions whose KV is there: all but the newest token's, which the next forward writes."""
    return min(len(req.origin_input_ids) + len(req.output_ids) - 1, req.kv.kv_allocated_len)


@dataclass
class EvictionStats:
    """Totals since start or the last flush; an evicted position that shared its slot frees none."""

    eviction_decisions: int = 0
    positions_evicted: int = 0
    slots_freed_by_eviction: int = 0


class EvictedPositions:
    """Positions whose row entry is -1. One byte a position once anything was evicted.

    Attributes:
        count: Evicted positions of the current row.
        first: The lowest of them, None while there is none.
        again: int64, ascending: what a row before a retraction had, to be evicted once more.
        history: ``(written, start, length)`` of the first evictions.
    """

    def __init__(self) -> None:
        self._mask = np.zeros(0, dtype=bool)
        self.count = 0
        self.first: int | None = None
        self.again = np.zeros(0, dtype=np.int64)
        self.history: list[tuple[int, int, int]] = []

    def any_in(self, start: int, end: int) -> bool:
        """Whether a position of ``[start, end)`` was evicted."""
        return self.count > 0 and bool(self._mask[start:end].any())

    def count_from(self, start: int) -> int:
        """Evicted positions at ``start`` and behind it."""
        return int(np.count_nonzero(self._mask[start:])) if self.count else 0

    def add(self, positions: np.ndarray, written: int) -> None:
        """Add held positions, ascending, evicted when ``written`` positions had their KV."""
        self.reserve(int(positions[-1]) + 1)
        self._mask[positions] = True
        self.count += len(positions)
        lowest = int(positions[0])
        self.first = lowest if self.first is None else min(self.first, lowest)
        for start, length in runs(positions)[: _REMEMBERED - len(self.history)]:
            self.history.append((written, start, length))

    def reserve(self, end: int) -> None:
        """Have memory for positions before ``end``."""
        self._mask = grown(self._mask, end)

    def still_held(self, positions: np.ndarray) -> np.ndarray:
        """Those of ``positions`` that are not evicted."""
        known = positions[positions < len(self._mask)]
        kept = np.ones(len(positions), dtype=bool)
        kept[: len(known)] = ~self._mask[known]
        return positions[kept]

    def held(self, written: int) -> np.ndarray:
        """int64, ascending: positions of ``[0, written)`` that were not evicted."""
        return self.still_held(np.arange(written))

    def forget_row(self) -> None:
        """The row is gone; the next one starts without evicted positions."""
        try:
            self.again = np.union1d(self.again, np.flatnonzero(self._mask))
        finally:
            self._mask[:] = False
            self.count, self.first = 0, None


class Totals(NamedTuple):
    """Of an accumulating policy: fp32 ``[positions]`` on the device, and positions whose queries
    are in them."""

    scores: torch.Tensor
    seen: int


@dataclass
class RowState:
    """Of one request. The dictionaries have policies' names as keys."""

    live_positions: int = 0  # row positions less the slots that they name
    slot_aliases: SlotAliases = field(default_factory=SlotAliases)
    evicted: EvictedPositions = field(default_factory=EvictedPositions)
    #: Written positions of the row before which a policy does not act again.
    next_eviction: dict[str, int] = field(default_factory=dict)
    #: Decisions whose scores are on their way from a GPU.
    decisions: dict[str, Decision] = field(default_factory=dict)
    totals: dict[str, Totals] = field(default_factory=dict)

    def forget_row(self) -> None:
        """The row is gone (finished, aborted or retracted)."""
        self.live_positions = 0
        self.next_eviction.clear()
        self.decisions.clear()
        self.totals.clear()
        self.evicted.forget_row()
        self.slot_aliases = SlotAliases()
