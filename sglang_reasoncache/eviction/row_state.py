# SPDX-License-Identifier: Apache-2.0
"""Which positions of one request are evicted, and what policies store about the request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.decision import Decision
from sglang_reasoncache.eviction.policies.evictor import runs

#: Most evictions of a request that the endpoint shows.
_REMEMBERED = 1024


def written_positions(req: Request) -> int:
    """Number of positions whose KV is written: all but the newest token's, which the next forward writes."""
    return min(len(req.origin_input_ids) + len(req.output_ids) - 1, req.kv.kv_allocated_len)


@dataclass
class EvictionStats:
    """Totals since the start or the last flush. An evicted position that shared its slot frees none."""

    eviction_decisions: int = 0
    positions_evicted: int = 0
    slots_freed_by_eviction: int = 0


class EvictedPositions:
    """The evicted positions of a row, whose entries are -1. Takes one byte per position once any was
    evicted.

    Attributes:
        count: Evicted positions of the current row.
        first: The lowest of them; None: there is none.
        again: Positions that were evicted before a retraction and must be evicted again: int64 ``[n]``,
            ascending.
        history: ``(written, start, length)`` of the first ``_REMEMBERED`` evicted runs of positions.
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
        """Number of evicted positions from ``start`` on."""
        return int(np.count_nonzero(self._mask[start:])) if self.count else 0

    def add(self, positions: np.ndarray, written: int) -> None:
        """Mark ``positions``, int64 ``[n]``, ascending, not empty, as evicted. ``written``: written
        positions of the request now, for the history."""
        self.reserve(int(positions[-1]) + 1)
        self._mask[positions] = True
        self.count += len(positions)
        lowest = int(positions[0])
        self.first = lowest if self.first is None else min(self.first, lowest)
        for start, length in runs(positions)[: _REMEMBERED - len(self.history)]:
            self.history.append((written, start, length))

    def reserve(self, end: int) -> None:
        """Allocate memory for the positions below ``end``."""
        size = len(self._mask)
        if end > size:
            self._mask = np.pad(self._mask, (0, max(end, 2 * size, 256) - size))

    def still_held(self, positions: np.ndarray) -> np.ndarray:
        """Those of ``positions``, int64 ``[n]``, ascending, that are not evicted."""
        known = positions[positions < len(self._mask)]
        kept = np.ones(len(positions), dtype=bool)
        kept[: len(known)] = ~self._mask[known]
        return positions[kept]

    def held(self, written: int) -> np.ndarray:
        """Positions of ``[0, written)`` that are not evicted: int64 ``[held]``, ascending."""
        return self.still_held(np.arange(written))

    def forget_row(self) -> None:
        """The row is gone. The next one starts without evicted positions; ``again`` remembers them."""
        try:
            self.again = np.union1d(self.again, np.flatnonzero(self._mask))
        finally:
            self._mask[:] = False
            self.count, self.first = 0, None


class Totals(NamedTuple):
    """Running totals of an accumulating policy. ``scores``: fp32 ``[positions]`` on the device; ``seen``:
    the queries of positions ``[0, seen)`` are counted in them."""

    scores: torch.Tensor
    seen: int


@dataclass
class RowState:
    """What eviction stores about one request. The dictionaries' keys are names of policies."""

    evicted: EvictedPositions = field(default_factory=EvictedPositions)
    #: A policy is not asked again before the row has this many written positions.
    next_eviction: dict[str, int] = field(default_factory=dict)
    #: Decisions whose scores are being copied from the GPU.
    decisions: dict[str, Decision] = field(default_factory=dict)
    totals: dict[str, Totals] = field(default_factory=dict)

    def forget_row(self) -> None:
        """The row is gone (finished, aborted or retracted)."""
        self.next_eviction.clear()
        self.decisions.clear()
        self.totals.clear()
        self.evicted.forget_row()
