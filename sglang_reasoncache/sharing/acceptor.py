# SPDX-License-Identifier: Apache-2.0
"""The one place that decides what of a proposal is applied, and changes rows.

Policies only propose. Nothing here looks at text or similarity: it checks what
must hold for the server's memory to stay right, and the distance threshold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang_reasoncache.cache.allocator import SharedPagedAllocator, SharedTokenAllocator
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.evicted_positions import EvictedPositions
from sglang_reasoncache.sharing.decision import BlockProposal, Eviction, EvictionRefusal, Refusal
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement


class Threshold(Protocol):
    """Distance threshold (PAT); see ``policy.threshold``."""

    @property
    def is_warm(self) -> bool: ...
    def decide(self, distances: Sequence[float]) -> Iterable[bool]: ...


class Evicted(NamedTuple):
    """Positions that became evicted positions, and slots that came back: fewer where others name them."""

    positions: int
    freed: int

    def __add__(self, other: tuple[Any, ...]) -> Evicted:
        return Evicted(self.positions + other[0], self.freed + other[1])


def refusal_of(block: BlockProposal, written: int, evicted: EvictedPositions) -> Refusal | None:
    """Why ``block`` must not be applied whatever its distance, or None.

    Args:
        block: The proposal.
        written: Positions of the request whose KV is surely in the pool.
        evicted positions: Of the request.
    """
    if block.dst_start < block.req.kv.cache_protected_len:
        # The prefix tree owns these; another request may read them.
        return Refusal.TREE_OWNED
    written = min(written, block.req.kv.kv_allocated_len)
    if block.dst_end > written or block.src_start + block.length > block.dst_start:
        return Refusal.NOT_WRITTEN
    if evicted.any_in(block.dst_start, block.dst_end) or evicted.any_in(
        block.src_start, block.src_start + block.length
    ):
        return Refusal.EVICTED
    return None


def refusal_of_eviction(
    evict: object, owned: int, written: int, page: int, evicted: EvictedPositions
) -> EvictionRefusal | None:
    """Why ``evict`` must not be applied, or None. It may be anything a policy returned.

    Args:
        owned: First position that may go.
        written: Positions whose KV is surely in the pool.
        page: Positions per page.
        evicted positions: Of the request.
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


class Acceptor:
    """Applies blocks between two forwards.

    A batch in flight may still read the old slots: they are only overwritten by
    a later forward on the same stream. The freed slots can be handed out at once.

    Args:
        allocator: Ours, with reference counts.
        req_to_token_pool: SGLang's rows.
        meter: Reads the pool.
        copy: Copy instead of redirecting (verification).
    """

    def __init__(
        self,
        allocator: SharedTokenAllocator | SharedPagedAllocator,
        req_to_token_pool: Any,
        meter: BlockMeter,
        copy: bool,
    ) -> None:
        self._allocator = allocator
        self._pool = req_to_token_pool
        self._meter = meter
        self._copy = copy

    def judge(self, distances: Sequence[float], threshold: Threshold) -> list[Refusal | None]:
        """Show the distances to the threshold and ask it about each."""
        accepted = threshold.decide(distances)
        refusal = Refusal.DISTANCE if threshold.is_warm else Refusal.WARMUP
        return [None if yes else refusal for yes in accepted]

    def apply(self, chosen: Sequence[int], measured: Measurement) -> list[bool]:
        """Redirect (or copy) the ``chosen`` blocks of a measured wave.

        The rows must be as they were measured, and no block of one request may use
        another's destination as source.

        Returns:
            For each, False where source and destination were the same slots already.
        """
        dst_slots, src_slots = measured.slots()
        changed = [src_slots[i] != dst_slots[i] for i in chosen]
        shifted = [i for i, yes in zip(chosen, changed, strict=True) if yes]
        if not shifted:
            return changed
        if self._copy:
            self._meter.copy(shifted, measured)
            return changed
        page = self._allocator.page_size
        # References first: a source must never be free in between.
        self._allocator.share([slot // page for i in shifted for slot in src_slots[i][::page]])
        device = measured.src_slots.device
        index = upload(shifted, device)
        self._pool.write(
            (measured.rows[index], measured.dst_at[index]),
            measured.src_slots[index].to(torch.int32),
        )
        self._allocator.release([slot // page for i in shifted for slot in dst_slots[i][::page]])
        return changed

    def evict(
        self,
        req: Any,
        evicted: EvictedPositions,
        evictions: Iterable[Eviction | None],
        written: int,
        refused: Counter[str],
        first: int = 0,
    ) -> Evicted:
        """Turn what is allowed of ``evictions`` into evicted positions and give up their references.

        Other references to the same slots, a shared block's, keep them alive. A batch in
        flight reads the old slots or the evicted positions; see the class for why either is right.

        Args:
            req: SGLang's request, which holds its row.
            evicted positions: Of the request; they grow by what is applied.
            written: Positions whose KV is surely in the pool.
            refused: Counts refusals by their value.
            first: No position before it, even if the request owns it.
        """
        first = max(first, req.kv.cache_protected_len)
        page = self._allocator.page_size
        parts = []
        for evict in evictions:
            refusal = refusal_of_eviction(evict, first, written, page, evicted)
            if refusal is not None:
                refused[refusal.value] += 1
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
        return Evicted(len(positions), self._allocator.evict(slots[::page].long() // page))
