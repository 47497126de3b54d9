# SPDX-License-Identifier: Apache-2.0
"""Blocks that could share, and what they give when SGLang is short: SGLang's pools, allocators and
release path with our controller. Random ones: ``tests/property/test_memory.py``."""

from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import Pair, Setup, World

SETUPS = [
    Setup(page=1, block=4, slots=120, publish="exact", when="short"),
    Setup(page=4, block=4, slots=160, publish="aliased", when="short"),
]
ALL_SETUPS = pytest.mark.parametrize("setup", SETUPS, ids=str)


def find(world: World, req: Req, *pairs: Pair) -> None:
    """The engine proposes blocks, and the next poll takes them."""
    state: Any = world.controller.state_of(req)
    world.engine.waiting[state.followed.id] += pairs
    for _ in range(2):
        world.step(req)
        world.controller.after_decode([req])


def lack(world: World, slots: int) -> int:
    """A decode step wants so many more slots than are free; how many come."""
    before = world.allocator.available_size()
    fits = world.allocator.check_decode_capacity(num_tokens=before + slots, tree_cache=world.tree)
    found: int = world.allocator.available_size() - before
    assert fits == (found >= slots)
    return found


def ledger(world: World) -> Any:
    return world.controller.pipeline.ledger


def pairs_of(world: World, req: Req) -> list[tuple[int, int]]:
    state: Any = world.controller.state_of(req)
    return [(block.dst_start, block.src_start) for block in state.redirected]


@ALL_SETUPS
@pytest.mark.parametrize("no_tree", [False, True])
def test_the_nearest_blocks_share_first_and_only_when_slots_are_short(
    setup: Setup, no_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without a prefix cache, where SGLang has nothing to evict."""
    monkeypatch.setattr("sglang_reasoncache.sharing.pipeline._LEAST_RECLAIMED", 1)
    world = World(setup, no_tree=no_tree)
    req = world.start()
    before = world.row(req).copy()
    # Contents count up, so near positions are near in KV.
    find(world, req, Pair(8, 28), Pair(16, 20), Pair(12, 24))
    assert ledger(world).slots == 12 and len(ledger(world)) == 3
    assert (world.row(req)[: len(before)] == before).all() and lack(world, 0) == 0
    assert [lack(world, 3), lack(world, 5), lack(world, 9)] == [4, 8, 0]
    assert pairs_of(world, req) == [(16, 20), (12, 24), (8, 28)]
    assert ledger(world).slots == world.controller.stats.blocks_missed == 0


def test_blocks_wait_unmeasured_while_the_pool_is_empty() -> None:
    """And are measured when it fills, or a request has to wait."""
    world = World(SETUPS[0])
    pipeline, use = world.controller.pipeline, [0.4]
    pipeline._use = lambda: use[0]
    req = world.start()
    find(world, req, Pair(8, 24))
    stats, state = world.controller.stats, world.controller.state_of(req)
    assert state is not None and len(state.pending) == 1 and stats.blocks_compared == 0
    expects = world.controller.pipeline.expected
    assert expects([state]) == 4 and world.controller.shareable() == 0, "expected, not promised"
    world.retract(req)
    world.come_back(req)
    world.controller.after_decode([req])
    assert len(state.pending) == 1 and state.row is not None and expects([state]) == 4
    budget = world.allocator.create_prefill_budget(world.tree)
    asked: dict[str, Any] = dict(extend_input_len=500, max_new_tokens=0, input_tokens=500)
    verdict, _ = budget.check_prefill(
        **asked, total_tokens=500, swa_host_hit_length=0, chunk_limit=None
    )
    assert not verdict
    for _ in range(2):
        world.controller.after_decode([req])
    assert stats.blocks_compared == 1 and ledger(world).slots == 4 and not state.pending
    pipeline._polls_to_measure, use[0] = 0, 0.6
    find(world, req, Pair(12, 20))
    assert ledger(world).slots == expects([state]) == 8


@pytest.mark.parametrize("percentile", [100, 50])
def test_unmeasured_blocks_raise_the_credit(percentile: float) -> None:
    """Of running requests and of those that finish, as far as the percentile will accept them."""
    world = World(SETUPS[0])
    pipeline, forecast = world.controller.pipeline, world.controller.forecast
    pipeline.threshold = AdaptiveThreshold(percentile, warmup=0)
    pipeline._use = lambda: 0.4
    req = world.start()
    find(world, req, Pair(8, 24), Pair(16, 20))
    assert forecast.credit == 0.0, "too few output tokens to go by"
    world.end(req, "finish")
    assert forecast.credit == pytest.approx(8 * percentile / 100 / len(req.output_ids))


@ALL_SETUPS
def test_a_prompt_that_is_admitted_finds_its_slots(setup: Setup) -> None:
    """What it needs now is reclaimed first; output to come may rely on the ledger."""
    world = World(setup)
    req = world.start()
    find(world, req, Pair(8, 24), Pair(12, 28))

    def admits(prompt: int, output: int) -> bool:
        budget = world.allocator.create_prefill_budget(world.tree)
        asked: dict[str, Any] = dict(extend_input_len=prompt, max_new_tokens=output)
        total: dict[str, Any] = dict(input_tokens=prompt, total_tokens=prompt + output)
        verdict, _ = budget.check_prefill(**asked, **total, swa_host_hit_length=0, chunk_limit=None)
        return bool(verdict)

    free, row = world.allocator.available_size(), world.row(req).copy()
    assert admits(4, free) and not admits(4, free + 8)
    assert (world.row(req) == row).all(), "nobody needs a slot yet"
    assert admits(free + 4, 0)
    assert world.allocator.available_size() == free + 8 and ledger(world).slots == 0


@pytest.mark.parametrize(
    ("values", "at_once"),
    [
        ({}, False),
        ({"when": "always"}, True),
        ({"policy": "reasoncache+keydiff:budget=64"}, True),
        ({"policy": "reasoncache+keydiff:budget=9:when=short"}, False),
        ({"policy": "reasoncache+quest"}, False),
        ({"preset": "memshare"}, True),
        ({"preset": "memshare", "when": "short"}, False),
    ],
)
def test_when_blocks_share(values: dict[str, Any], at_once: bool) -> None:
    assert ReasonCacheConfig.from_mapping(values).shares_at_once == at_once
