# SPDX-License-Identifier: Apache-2.0
"""The one place that decides which proposed blocks are shared, and redirects rows.

The filter only proposes. Nothing here looks at text or similarity: it checks what must hold
for the server's memory to stay right, and the distance threshold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_reasoncache.cache.allocator import SharedPagedAllocator, SharedTokenAllocator
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import ReqToTokenPool
from sglang_reasoncache.eviction.row_state import EvictedPositions
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold


def refusal_of(block: BlockProposal, written: int, evicted: EvictedPositions) -> Refusal | None:
    """Why ``block`` must not be applied whatever its distance, or None.

    Args:
        block: The proposal.
        written: Positions of the request whose KV is surely in the pool.
        evicted: Evicted positions of the request.
    """
    kv = block.req.kv
    if block.dst_start < kv.cache_protected_len:
        # The prefix tree owns these; another request may read them.
        return Refusal.TREE_OWNED
    src_end = block.src_start + block.length
    if block.dst_end > min(written, kv.kv_allocated_len) or src_end > block.dst_start:
        return Refusal.NOT_WRITTEN
    if evicted.any_in(block.dst_start, block.dst_end) or evicted.any_in(block.src_start, src_end):
        return Refusal.EVICTED
    return None


class Acceptor:
    """Shares blocks between two forwards.

    A batch in flight may still read the old slots: they are only overwritten by
    a later forward on the same stream. The freed slots can be handed out at once.

    Args:
        allocator: Ours, with reference counts.
        req_to_token_pool: SGLang's rows.
        meter: Reads the pool.
        copies: Copy instead of redirecting (verification).
    """

    def __init__(
        self,
        allocator: SharedTokenAllocator | SharedPagedAllocator,
        req_to_token_pool: ReqToTokenPool,
        meter: BlockMeter,
        copies: bool,
    ) -> None:
        self._allocator = allocator
        self._pool = req_to_token_pool
        self._meter = meter
        self.copies = copies

    def judge(
        self, distances: Sequence[float], threshold: AdaptiveThreshold
    ) -> list[Refusal | None]:
        """Show the distances to the threshold and ask it about each."""
        accepted = threshold.decide(distances)
        refusal = Refusal.DISTANCE if threshold.is_warm else Refusal.WARMUP
        return [None if yes else refusal for yes in accepted]

    def apply(self, chosen: Sequence[int], measured: Measurement) -> list[bool]:
        """Redirect (or copy) the ``chosen`` blocks of a measured batch.

        The rows must be as they were measured, and no block of one request may use
        another's destination as source.

        Returns:
            For each, False where source and destination were the same slots already.
        """
        dst_slots, src_slots = measured.slots()
        changed = [src_slots[i] != dst_slots[i] for i in chosen]
        redirected = [i for i, yes in zip(chosen, changed, strict=True) if yes]
        if not redirected:
            return changed
        if self.copies:
            self._meter.copy(redirected, measured)
            return changed
        page = self._allocator.page_size
        # References first: a source must never be free in between.
        self._allocator.share([slot // page for i in redirected for slot in src_slots[i][::page]])
        index = upload(redirected, measured.src_slots.device)
        self._pool.write(
            (measured.rows[index], measured.dst_at[index]),
            measured.src_slots[index].to(torch.int32),
        )
        self._allocator.release([slot // page for i in redirected for slot in dst_slots[i][::page]])
        return changed
