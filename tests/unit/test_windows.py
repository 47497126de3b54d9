# SPDX-License-Identifier: Apache-2.0
"""Tests sharing in models whose sliding-window layers have a second KV pool with slots for the window only."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.arg_groups.parallel_hook import handle_deprecated_dp_attention
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from sglang_reasoncache import compat
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.swap import swapped_of
from sglang_reasoncache.compat.carriers import COPIED
from sglang_reasoncache.config import ReasonCacheConfig, ResolvedConfig
from sglang_reasoncache.plugin.server import ServerParts, schedulers_per_node
from sglang_reasoncache.sharing.request import record_of
from tests.property.adder import adder_of
from tests.property.windows import WINDOW, WindowWorld
from tests.property.world import ENDS, Pair, Setup

pytestmark = pytest.mark.usefixtures("published_config")
CHUNK = 16
BLOCK = 4
SLOTS = 300
#: Every request's prompt and output are the start of this text, so the tree holds prefixes of later requests.
TEXT = list(range(1, 130))


class Windows(WindowWorld):
    def __init__(self, core: str, page: int = 1, swap: int = 0) -> None:
        super().__init__(Setup(page, BLOCK, SLOTS, core=core, swap=swap))

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
            full += self.in_pages(len(row) - req.kv.cache_protected_len)
            assert self.window(row) == TEXT[max(len(row) - WINDOW, 0) : len(row)]
        window += self.of_requests(live)
        assert (full - self.controller.pipeline.saved, window) == (SLOTS, SLOTS)


@pytest.mark.parametrize("page", [1, 2])
@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("seed", range(8))
def test_windows_stay_whole_and_nothing_is_lost(seed: int, core: str, page: int) -> None:
    """Requests reuse cached prefixes, share, are retracted and end. The tree evicts windows and
    prefixes, and requests publish them again."""
    world = Windows(core, page)
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


@pytest.mark.parametrize("fails", ["", "full_kv_pool", "swa_kv_pool"])
@pytest.mark.parametrize("prompt", [3, 20], ids=["short-prompt", "long-prompt"])
@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_retracted_request_comes_back_with_its_last_window(
    core: str, page: int, prompt: int, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last window of the response gets slots in the window pool. If its KV cannot be loaded, it is
    computed again, and no slot of either pool is lost."""
    world = Windows(core, page, swap=1 << 20)
    req = world.request("r", TEXT[:prompt])
    world.prefill(req)
    req.output_ids.append(TEXT[prompt])
    while req.kv.kv_allocated_len < 60:
        world.step(req)
    world.retract(req)
    swapped: Any = swapped_of(req)
    assert (swapped.length, swapped.in_window) == (60, WINDOW)
    world.tree.evict(EvictParams(num_tokens=SLOTS, swa_num_tokens=SLOTS))
    if fails:
        monkeypatch.setattr(getattr(world.both, fails), "load_cpu_copy", fail)
    req.init_next_round_input(world.tree)
    assert (req.host_hit_length, req.swa_host_hit_length) == (60, WINDOW)
    adder = adder_of(world, [], 1 << 12)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert adder.can_run_list == [req]
    before = world.allocator.swa_available_size()
    restored = 0 if fails else 60
    assert req.prefix_len == restored
    world.write(world.extend(req), TEXT[restored:61])
    checkpoint_kv_cache(req, world.tree)
    assert before - world.allocator.swa_available_size() <= max(61 - restored, page)
    world.check([req])
    assert (world.controller.report.disabled is None) == (not fails)
    for _ in range(2 * WINDOW):
        world.step(req)
        world.check([req])
    world.finish(req)
    world.tree.evict(EvictParams(num_tokens=SLOTS, swa_num_tokens=SLOTS))
    assert world.allocator.full_available_size() == world.allocator.swa_available_size() == SLOTS


@pytest.mark.parametrize("page", [1, 4])
def test_a_copy_is_made_however_soon_after_the_prompt(page: int) -> None:
    """SGLang counts the prompt as freed, although the prefix tree still has its windows."""
    for written in range(21, 21 + 3 * WINDOW):
        world = Windows("python", page, swap=1 << 20)
        req = world.request("r", TEXT[:20])
        world.prefill(req)
        req.output_ids.append(TEXT[20])
        while req.kv.kv_allocated_len < written:
            world.step(req)
        world.retract(req)
        swapped = swapped_of(req)
        assert swapped is not None and swapped.length == written // page * page


def test_a_small_window_pool_takes_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    """In a smaller pool SGLang might never admit a request that comes back. The log says so."""
    world = Windows("python")
    least = world.tree.least_window_pool
    interval = compat.envs.SGLANG_SWA_EVICTION_INTERVAL.get()
    assert least == 3 * WINDOW + 1 + interval + 1 + 1
    parts: Any = SimpleNamespace(
        allocator=world.allocator,
        _draft_pools=[],
        _cached=world.cached_at,
        _reads_as_cached=lambda _: None,
    )
    args: Any = SimpleNamespace(speculative_algorithm=None, disaggregation_mode="null")
    resolved = ResolvedConfig(ReasonCacheConfig(host_swap_gb=1), page=1)
    for size in (least, least - 1):
        world.allocator._size_swa = size
        swap = ServerParts._swap(parts, world.tree, resolved, args)
        assert (swap is None) == (size < least)
    assert "host_swap_gb has no effect" in caplog.text and f"less than {least} slots" in caplog.text


@pytest.mark.parametrize(
    ("flags", "nodes", "expected"),
    [
        (dict(dp_size=8, enable_dp_attention=True), 1, 8),
        (dict(dp_size=8, enable_dp_attention=True), 2, 4),
        (dict(attn_dp_size=8), 1, 8),
        (dict(dp_size=2), 1, 16),
        ({}, 1, 8),
    ],
)
def test_schedulers_that_share_the_memory_of_a_machine(
    flags: dict[str, Any], nodes: int, expected: int
) -> None:
    """With DP attention ``--dp-size`` counts groups of the ranks that ``--tp-size`` counts."""
    args = compat.ServerArgs(model_path="none", device="cpu", tp_size=8, nnodes=nodes, **flags)
    handle_deprecated_dp_attention(args)
    assert schedulers_per_node(args) == expected


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no host memory")


@pytest.mark.parametrize("page", [1, 4])
def test_a_decode_server_copies_a_draft_models_windows(page: int) -> None:
    """SGLang's copy as tensors lacks the draft model's KV, here that of a pool like the served model's."""
    world = Windows("python", page)
    allocator = world.allocator
    pool = allocator.get_kvcache()
    allocator.handover = Handover(world.rows, world.cached_at, None, [pool])
    req = world.request("r", TEXT[:20])
    world.prefill(req)
    req.output_ids.append(TEXT[20])
    while req.kv.kv_allocated_len < 90:
        world.step(req)
    length = req.seqlen - 1
    slots = torch.from_numpy(world.row(req)[:length].copy()).long()
    expected = pool.get_cpu_copy(slots)
    req.offload_kv_cache(world.rows, allocator)
    world.retract(req)
    [copied] = getattr(req, COPIED).drafts
    assert copied["swa_mask"].tolist() == expected["swa_mask"].tolist()
    assert WINDOW <= int(copied["swa_mask"].sum()) <= length
    for kind in ("full", "swa"):
        for layer, others in zip(copied[kind], expected[kind], strict=True):
            for part, other in zip(layer, others, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(part, other, strict=True))
