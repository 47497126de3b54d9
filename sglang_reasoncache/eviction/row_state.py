# SPDX-License-Identifier: Apache-2.0
"""What eviction stores about one request, a policy's decision which positions to evict, and counters. The
request's :class:`HostRow` stores which positions are evicted."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.device.download import Download
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import lowest


def written_positions(req: Request) -> int:
    """Number of positions whose KV is written. The next forward writes the KV of the newest token."""
    return min(len(req.origin_input_ids) + len(req.output_ids) - 1, req.kv.kv_allocated_len)


def counter(text: str) -> Any:
    """A dataclass field that starts at 0 and is exported as a Prometheus counter with the help ``text``."""
    return field(default=0, metadata={"help": text})


@dataclass
class EvictionStats:
    """Totals since the start or the last flush. Evicting a position frees no slot that other positions use."""

    eviction_decisions: int = counter("Times an evicting policy was asked what to evict.")
    positions_evicted: int = counter("Positions evicted by evicting policies.")
    slots_freed_by_eviction: int = counter("Slots returned to the allocator by evicting.")


class Decision(Download):
    """Chooses the lowest-scored candidates of one request, so that ``count`` slots become free.

    Args:
        view: The view of the request for which ``scores`` were computed.
        candidates: Positions that may be evicted: int64 ``[n]``, ascending, at least one.
        scores: This rank's scores: float ``[held]`` on the device where they were computed.
        count: Number of slots to free, above 0.

    Raises:
        ValueError: ``scores`` have another shape. On a GPU the wrong index would end the scheduler.
    """

    def __init__(
        self, view: View, candidates: np.ndarray, scores: torch.Tensor, count: int
    ) -> None:
        check_shape(scores, view)
        at = np.searchsorted(view.held, candidates)
        super().__init__(scores[upload(at, scores.device)].double())
        self._candidates = candidates
        self._first = view.first_readers[at]
        self._worth = view.worth[at]
        self._page = view.page
        self._count = count

    def positions(self, ranks: Ranks, most: int | None = None) -> np.ndarray:
        """The chosen positions: int64 ``[n]``, ascending, the same on all ranks. All ranks call this together.
        On a GPU this waits for the scores unless they are :meth:`ready`. ``most``: how many slots to free at
        most. Since the policy decided, another one may have evicted, or blocks may have shared."""
        [sums] = self.wait()
        ranks.add(sums)
        count = self._count if most is None else min(self._count, most)
        if count <= 0:
            return self._candidates[:0]
        chosen = lowest(sums.numpy(), self._first, self._worth, self._page, count)
        return self._candidates[chosen]


def check_shape(scores: torch.Tensor, view: View) -> None:
    """Raise ValueError unless a policy gave one score for each held position."""
    if scores.shape != view.held.shape:
        raise ValueError(
            f"a policy's scores need the shape {view.held.shape}, got {tuple(scores.shape)}"
        )


class Totals(NamedTuple):
    """Running totals of a policy (see ``Evictor.accumulates``). ``scores``: fp32 ``[positions]`` on the device;
    ``seen``: the queries of positions ``[0, seen)`` are counted in ``scores``."""

    scores: torch.Tensor
    seen: int


@dataclass
class RowState:
    """What eviction stores about one request. The dictionaries' keys are names of policies."""

    #: Positions that were evicted before a retraction and must be evicted again: int64 ``[n]``, ascending.
    again: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    #: The first evicted runs, for ``GET /reasoncache/details``: ``(written, start, length)``. ``written`` is
    #: the number of positions that were written when positions ``[start, start + length)`` were evicted.
    evictions: list[tuple[int, int, int]] = field(default_factory=list)
    #: A policy is not asked again before the row has this many written positions.
    next_eviction: dict[str, int] = field(default_factory=dict)
    #: Decisions whose scores are being copied from the GPU.
    decisions: dict[str, Decision] = field(default_factory=dict)
    totals: dict[str, Totals] = field(default_factory=dict)

    def lose_row(self, row: HostRow) -> None:
        """Forget ``row`` after its request finished, was aborted or was retracted. Nothing is evicted yet in
        the request's next row, so ``again`` remembers which positions to evict there."""
        self.next_eviction.clear()
        self.decisions.clear()
        self.totals.clear()
        self.again = np.union1d(self.again, row.evicted_from(0))
