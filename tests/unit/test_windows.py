# SPDX-License-Identifier: Apache-2.0
"""Tests sharing in models whose sliding-window layers have a second KV pool with slots for the window only."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from sglang_reasoncache.attention import models
from sglang_reasoncache.errors import CannotShare
from sglang_reasoncache.sharing.request import record_of
from tests.property.windows import WINDOW, WindowWorld
from tests.property.world import ENDS, Pair, Setup

pytestmark = pytest.mark.usefixtures("published_config")
CHUNK = 16
BLOCK = 4
SLOTS = 300
#: Every request's prompt and output are the start of this text, so the tree holds prefixes of later requests.
TEXT = list(range(1, 130))


class Windows(WindowWorld):
    def __init__(self, core: str) -> None:
        super().__init__(Setup(1, BLOCK, SLOTS, core=core))

    def write(self, slots: np.ndarray, contents: Any) -> None:
        super().write(slots, contents)
        self.write_window(slots, contents)

    def prefill(self, req: Req) -> None:
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        whole = len(req.full_untruncated_fill_ids)
        while req.prefix_len < whole:
            req.extend_end = min(req.prefix_len + CHUNK, whole)
            start = req.prefix_len
            slots = self.extend(req)
            self.write(slots, TEXT[start : req.extend_end])
            checkpoint_kv_cache(req, self.tree)

    def step(self, req: Req, token: int = 0) -> None:
        super().step(req, token or TEXT[req.kv.kv_allocated_len])
        req.output_ids[-1] = TEXT[req.kv.kv_allocated_len]

    def check(self, live: list[Req]) -> None:
        """Checks that the KV in each request's window is right, and that no slot of either pool is lost."""
        tree = self.tree
        pools = self.allocator
        full = tree.full_evictable_size() + tree.full_protected_size() + pools.full_available_size()
        window = tree.swa_evictable_size() + tree.swa_protected_size() + pools.swa_available_size()
        for req in live:
            row = self.row(req).copy()
            full += len(row) - req.kv.cache_protected_len
            assert self.window(row) == TEXT[max(len(row) - WINDOW, 0) : len(row)]
        window += self.of_requests(live)
        assert (full - self.controller.pipeline.saved, window) == (SLOTS, SLOTS)


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("seed", range(8))
def test_windows_stay_whole_and_nothing_is_lost(seed: int, core: str) -> None:
    """Requests reuse cached prefixes, share, are retracted and end. The tree evicts windows and
    prefixes, and requests publish them again."""
    world = Windows(core)
    dice = random.Random(seed)
    live = list[Req]()
    away = list[Req]()
    for number in range(400):
        roll = dice.random()
        if roll < 0.06 and len(live) < 3:
            fresh = world.request(str(number), TEXT[: dice.randrange(1, 60)])
            req = away.pop() if away and dice.random() < 0.7 else fresh
            world.prefill(req)
            live.append(req)
            if req is fresh:
                req.output_ids.append(TEXT[len(req.origin_input_ids)])
        elif roll < 0.1 and live:
            req = live.pop(dice.randrange(len(live)))
            world.end(req, dice.choice(ENDS))
            away += [req] * req.is_retracted
        elif roll < 0.16:
            world.tree.evict(EvictParams(num_tokens=dice.randrange(9), swa_num_tokens=40))
        for req in live:
            if req.kv.kv_allocated_len < 120:
                world.step(req)
            state: Any = record_of(req)
            if state and req.kv.kv_allocated_len > 2 * BLOCK and dice.random() < 0.4:
                pair = Pair(*dice.sample(range(req.kv.kv_allocated_len - BLOCK), 2))
                world.engine.waiting[state.followed.id].append(pair)
        world.controller.after_decode(live)
        assert world.controller.report.disabled is None
        world.check(live)
    assert world.controller.stats.blocks_shared > 5
    for req in live:
        world.finish(req)
    world.tree.evict(EvictParams(num_tokens=SLOTS, swa_num_tokens=SLOTS))
    world.check([])
    assert world.allocator.full_available_size() == world.allocator.swa_available_size() == SLOTS


def test_what_excludes_a_window_pool_is_refused() -> None:
    pool: Any = Windows("python").both
    for flag, tier, mode in (
        ("--enable-hierarchical-cache", True, "null"),
        ("--disaggregation-mode decode", False, "decode"),
    ):
        args: Any = SimpleNamespace(enable_hierarchical_cache=tier, disaggregation_mode=mode)
        with pytest.raises(CannotShare, match=f"{flag} .*; --disable-hybrid-swa"):
            models.check_windows(pool, args)
        models.check_windows(pool.full_kv_pool, args)
    pool.page_size = 16
    with pytest.raises(CannotShare, match="--page-size 16 .*--attention-backend triton"):
        models.check_pool(pool)
