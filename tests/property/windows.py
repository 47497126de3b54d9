# SPDX-License-Identifier: Apache-2.0
"""The KV cache of one scheduler whose model has layers with sliding windows, in a KV pool of their own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import shared_allocator_of
from tests.property.world import LAYERS, World

WINDOW = 8
#: Whether prefixes' windows are released early (SGLANG_OPT_RELEASE_PREFILL_SWA). With that SGLang 0.5.22 loses
#: slots, even if nothing is shared.
RELEASES = compat.version("sglang") != "0.5.22"


class WindowWorld(World):
    """A ``World`` with one more layer, which has a window and its own pool. ``peers``: slots in that pool."""

    @property
    def window_slots(self) -> int:
        """Size of that pool."""
        return self.setup.slots

    def make_allocator(self) -> Any:
        slots = self.setup.slots
        windowed = self.window_slots
        page = self.page
        same: Any = dict(head_num=1, head_dim=4, dtype=torch.float32, device="cpu")
        layers: Any = dict(swa_attention_layer_ids=[LAYERS], full_attention_layer_ids=[0, 1])
        self.both = SWAKVPool(size=slots, size_swa=windowed, page_size=page, **same, **layers)
        self.both.full_kv_pool = self.pool
        stock = SWATokenToKVPoolAllocator(
            slots, windowed, page, torch.float32, "cpu", self.both, False
        )
        return shared_allocator_of(stock)

    def set_components(self, params: CacheInitParams) -> None:
        params.tree_components = (ComponentType.FULL, ComponentType.SWA)
        params.sliding_window_size = WINDOW

    def in_pages(self, tokens: int) -> int:
        """Number of slots of the whole pages that hold ``tokens``."""
        return -(-tokens // self.page) * self.page

    def peers(self, slots: Any) -> torch.Tensor:
        return self.allocator.full_to_swa_index_mapping[torch.as_tensor(slots).long()]

    def decode(self, reqs: Sequence[Req]) -> np.ndarray:
        self.allocator.free_group_begin()
        for req in reqs:
            self.tree.evict_sliding_windows(req, req.seqlen - 1)
            has_passed = (
                req.kv.kv_allocated_len - self.in_pages(WINDOW) >= req.kv.cache_protected_len
            )
            if RELEASES and has_passed:
                self.tree.release_swa_prefix_lock(req)
        self.allocator.free_group_end()
        return super().decode(reqs)

    def write_window(self, slots: np.ndarray, contents: Sequence[int]) -> None:
        """What a forward writes into the window pool. Slots without peers are left out."""
        peers = self.peers(slots)
        for buffer in self.both.get_kv_buffer(LAYERS):
            buffer[peers[peers > 0]] = torch.tensor(contents)[peers > 0][:, None, None].float()

    def window(self, row: np.ndarray) -> list[int]:
        """What the window layer reads for the token behind ``row``."""
        first = max(len(row) - WINDOW, 0)
        peers = self.peers(row[first:])
        assert (peers > 0).all(), "a position of the window has no peer"
        keys, values = self.both.get_kv_buffer(LAYERS)
        assert torch.equal(keys[peers], values[peers])
        found: list[int] = keys[peers, 0, 0].long().tolist()
        return found

    def of_requests(self, reqs: Sequence[Req]) -> int:
        """Number of slots of the window pool that belong to ``reqs`` alone, in whole pages."""
        found = 0
        for req in reqs:
            freed = req.kv.get_evicted_seqlen(ComponentType.SWA)
            alone = req.kv.kv_allocated_len - max(freed, req.kv.cache_protected_len)
            found += self.in_pages(alone)
        return found

    def free_pages(self) -> np.ndarray:
        found: np.ndarray = self.allocator.full_attn_allocator.get_all_free_pages().numpy()
        return found
