# SPDX-License-Identifier: Apache-2.0
"""No path from a decode or prefill step waits for the device."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang_reasoncache.eviction.policies.by_attention import H2O
from sglang_reasoncache.eviction.policies.by_keys import KeyDiff, L2Norm
from sglang_reasoncache.kernels import distance
from tests.eviction.rows import world_of, everything_comes_back as everything_comes_back
from tests.property.world import Pair, Setup, World, decode, finish, prefill, propose, retract, start, PROMPT
from tests.strict_device import StrictDevice, guarded, strict_device

PAGES = [1, 4]

ALLOCATOR = ("alloc","alloc_extend", "alloc_decode", "free", "free_segment", "free_page_ids", "free_group_end", "evict", "share", "release")
TREE = ("checkpoint", "on_release", "insert", "match_prefix", "evict", "free_kv_row", "lock", "unlock")
CONTROLLER = ("after_decode", "after_prefill", "after_chunk", "on_release", "describe")

@pytest.fixture
def device(monkeypatch) -> Iterator[StrictDevice]:
    with strict_device() as made:
        monkeypatch.setattr(World, "device", "cuda")
        monkeypatch.setattr(distance, "choose_backend", lambda *_: "torch")
        init = World.__init__
        def ours(self, *a, **k):
            init(self, *a, **k)
            guarded(made, self.allocator, *(n for n in ALLOCATOR if hasattr(self.allocator, n)))
            guarded(made, self.tree, *TREE)
            guarded(made, self.controller, *CONTROLLER)
        monkeypatch.setattr(World, "__init__", ours)
        yield made

def shared(world, name="r", first=100):
    req = start(world, name, first)
    propose(world, req, Pair(20, 8))
    for _ in range(4):
        decode(world, req); world.controller.after_decode([req])
    return req

@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("publish", ["exact", "aliased"])
@pytest.mark.parametrize("end", ["finish","retract"])
def test_share(device, page, publish, end):
    world = World(Setup(page, 4, 200, publish))
    req = shared(world)
    assert world.controller.live_positions == 4
    world.controller.describe(); 
    if end == "finish":
        finish(world, req)
    else:
        retract(world, req)
        prefill(world, req); 
        for _ in range(4): decode(world, req); world.controller.after_decode([req])
        finish(world,req)
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    world.tree.evict(EvictParams(num_tokens=1000))
    assert world.allocator.available_size()==200

@pytest.mark.parametrize("page", PAGES)
def test_evict(device, page):
    world = World(Setup(page, 4, 200, "exact"))
    req = shared(world)
    from sglang_reasoncache.eviction.policies.contract import Eviction
    world.evictor.waiting["r"]=[Eviction(12,4)]
    for _ in range(4): decode(world, req); world.controller.after_decode([req])
    assert world.controller.saved_positions >= 4
    finish(world, req)
