# SPDX-License-Identifier: Apache-2.0
"""The one place that decides whether a proposed block may be shared, and redirects rows.

Policies only propose. Nothing here looks at text or similarity: it checks what
must hold for the server's memory to stay right, and the distance threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from sglang_reasoncache.cache.allocator import SharedPagedAllocator, SharedTokenAllocator
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal
from sglang_reasoncache.sharing.measure import BlockMeter, Located


class Threshold(Protocol):
    """Distance threshold (PAT); see ``policy.threshold``."""

    @property
    def is_warm(self) -> bool: ...
    def decide(self, distances: Sequence[float]) -> Iterable[bool]: ...


def refusal_of(block: BlockProposal, written: int) -> Refusal | None:
    """Why ``block`` must not be applied whatever its distance, or None.

    Args:
        block: The proposal.
        written: Positions of the request whose KV is surely in the pool.
    """
    if block.dst_start < block.req.kv.cache_protected_len:
        # The prefix tree owns these; another request may read them.
        return Refusal.TREE_OWNED
    if block.dst_end > written or block.src_start + block.length > block.dst_start:
        return Refusal.NOT_WRITTEN
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

    def apply(self, blocks: Sequence[BlockProposal], located: Located) -> list[bool]:
        """Redirect (or copy) every block; False where source and destination are the same slots already.

        ``blocks`` of one request must not use another's destination as source.
        """
        src_rows = located.src_slots.tolist()
        dst_rows = located.dst_slots.tolist()
        changed = [src != dst for src, dst in zip(src_rows, dst_rows, strict=True)]
        chosen = [i for i, yes in enumerate(changed) if yes]
        if not chosen:
            return changed
        if self._copy:
            self._meter.copy([blocks[i] for i in chosen], located.select(chosen))
            return changed
        page = self._allocator.page_size
        # References first: a source must never be free in between.
        self._allocator.share([slot // page for i in chosen for slot in src_rows[i][::page]])
        for i in chosen:
            block = blocks[i]
            self._pool.write(
                (block.req.kv.req_pool_idx, slice(block.dst_start, block.dst_end)),
                located.src_slots[i].to(torch.int32),
            )
        freed = [slot // page for i in chosen for slot in dst_rows[i][::page]]
        self._allocator.free_page_ids(
            torch.tensor(freed, dtype=torch.int64, device=located.dst_slots.device)
        )
        return changed
