# SPDX-License-Identifier: Apache-2.0
"""Redirects the rows of blocks that were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_reasoncache.cache.allocator import SharedPagedAllocator, SharedTokenAllocator
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import ReqToTokenPool
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement


class Acceptor:
    """Shares blocks between two forwards.

    A batch in flight may still read the old slots: they are only overwritten by
    a later forward on the same stream. The freed slots can be handed out at once.
    With ``copies`` it copies instead of redirecting (verification).
    """

    def __init__(
        self,
        allocator: SharedTokenAllocator | SharedPagedAllocator,
        req_to_token_pool: ReqToTokenPool,
        meter: BlockMeter,
        copies: bool,
    ) -> None:
        self._allocator, self._pool, self._meter = allocator, req_to_token_pool, meter
        self.copies = copies

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
