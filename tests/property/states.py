# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one scheduler whose model has attention layers and state layers (Mamba)."""

from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocation import ensure_mamba_capacity
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from tests.property.world import MAX_CONTEXT, Setup, World

STATES = 24
STRATEGIES = ("no_buffer", "extra_buffer")
SMALL = Setup(page=1, block=4, slots=120)


class States(World):
    """A state holds the number of positions that it has seen.

    ``strategy``: ``--mamba-radix-cache-strategy``."""

    def __init__(self, strategy: str, setup: Setup = SMALL, *more: Any, **named: Any) -> None:
        self.copies = strategy == "extra_buffer"
        super().__init__(setup, *more, **named)

    def make_rows(self) -> HybridReqToTokenPool:
        shape = Mamba2StateShape.create(
            **dict(tp_world_size=1, intermediate_size=4, n_groups=1, num_heads=1),
            **dict(head_dim=4, state_size=2, conv_kernel=2),
        )
        return HybridReqToTokenPool(
            **dict(size=self.max_rows, mamba_size=STATES, mamba_spec_state_size=self.max_rows),
            **dict(max_context_len=MAX_CONTEXT, device="cpu", enable_memory_saver=False),
            cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=self.copies,
        )

    def set_components(self, params: CacheInitParams) -> None:
        params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
        params.enable_mamba_extra_buffer = self.copies

    def write(self, slots: object, contents: object) -> None:
        """Acts as a forward pass: afterwards each request's state has seen all positions of the request."""
        super().write(slots, contents)  # type: ignore[arg-type]
        for req in self.requests if hasattr(self, "controller") else ():
            if req.kv.holds_mamba and req.kv.holds_kv:
                self.set_state(req.kv.mamba_pool_idx, req.kv.kv_allocated_len)

    def extend(self, req: Req) -> Any:
        assert ensure_mamba_capacity(self.rows, [req], self.tree)
        return super().extend(req)

    def set_state(self, slot: torch.Tensor, positions: int) -> None:
        for state in (
            self.rows.mamba_pool.mamba_cache.temporal,
            self.rows.mamba_pool.mamba_cache.conv[0],
        ):
            state[:, slot] = positions

    def track(self, req: Req, length: int | None = None) -> None:
        """Copies the request's state after ``length`` positions, all if None, and keeps the previous copy too.
        SGLang does this at intervals."""
        kv = req.kv
        length = kv.kv_committed_len if length is None else length
        pool = self.rows
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
        kv.mamba_last_track_seqlen = length
        slot = kv.mamba_ping_pong_track_buffer[kv.mamba_last_track_idx]
        self.set_state(slot, length)

    def cached(self, tokens: list[int], opted_out: bool = False) -> int:
        """How many of ``tokens`` a new request finds cached. Checks that the cached state has seen as many."""
        req = self.request("again", [*tokens, 1], opted_out)
        req.init_next_round_input(self.tree)
        found = req.prefix_len
        if found:
            seen = self.rows.mamba_pool.mamba_cache.temporal[0, req.kv.mamba_cow_src_index]
            assert seen.unique().tolist() == [found]
            self.give_up(req)
        return found

    def give_up(self, req: Req) -> None:
        """What the scheduler does if a request was matched and cannot be admitted."""
        req.kv.mamba_cow_src_index = None
        req.kv.mamba_needs_clear = False
        if req.kv.holds_mamba:
            self.rows.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(0))
            req.kv.mamba_pool_idx = None

    def assert_whole(self) -> None:
        """Check that slots and states are free or evictable, and that all are free once the tree is empty."""
        free = self.allocator.available_size()
        states = self.rows.mamba_allocator.available_size()
        assert free + self.tree.full_evictable_size() == self.total
        assert states + self.tree.mamba_evictable_size() == STATES
        self.tree.evict(EvictParams(num_tokens=self.total, mamba_num=STATES))
        assert self.allocator.available_size() == self.total
        assert self.rows.mamba_allocator.available_size() == STATES
