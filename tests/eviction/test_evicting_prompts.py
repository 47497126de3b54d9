# SPDX-License-Identifier: Apache-2.0
"""Prompts that are evicted chunk by chunk, on SGLang's pools and rows."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.streamingllm import StreamingLLM
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.eviction.rows import steps, world_of
from tests.property.world import Eviction, Setup, World
from tests.unit.test_pipeline import used

#: Smaller than a prompt.
SINGLE = Setup(page=1, block=4, slots=64, publish="exact")
PAGED = Setup(page=4, block=4, slots=64, publish="exact")
SETUPS = pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)
TREES = pytest.mark.parametrize("no_tree", [False, True], ids=["tree", "no-tree"])
PROMPT = list(range(1, 101))
BUDGET, CHUNK = 24, 8


def hard(kind: type = StreamingLLM) -> Evictor:
    """At most ``BUDGET`` positions after every poll, the prompt's included."""
    return kind(budget=BUDGET, slack=0, recent=1, prompt=True)


def chunk(world: World, req: Req, first: bool = False) -> bool:
    """Compute the next ``CHUNK`` positions as the scheduler does; True while some are left."""
    if first:
        req.init_next_round_input(world.tree)
        req.lock = world.tree.lock(req.last_node)
    else:
        req.init_next_round_input()
    total = len(req.full_untruncated_fill_ids)
    begin, req.extend_end = req.prefix_len, min(req.prefix_len + CHUNK, total)
    slots = world.extend(req)
    world.write(slots, range(begin, req.extend_end))
    if req.extend_end < total:
        # The next round begins with this.
        checkpoint_kv_cache(req, world.tree)
        return True
    world.allocator.free_group_begin()
    req.output_ids.append(7)
    checkpoint_kv_cache(req, world.tree)
    world.allocator.free_group_end()
    world.controller.after_prefill([req], [total])
    return False


def start(world: World, name: str = "r", prompt: Sequence[int] = PROMPT) -> Req:
    req = world.request(name, prompt)
    for _ in chunks(world, req):
        pass
    return req


def chunks(world: World, req: Req) -> Iterator[None]:
    """Compute the prompt; what a test asserts between two chunks it does here."""
    more = chunk(world, req, first=True)
    while more:
        yield
        more = chunk(world, req)


def held(world: World, req: Req) -> list[int]:
    """Positions of the row that have a slot; each must hold what was computed for it."""
    row = world.row(req)
    kept = np.flatnonzero(row >= 0)
    assert (world.contents()[row[kept]] == kept).all()
    return kept.tolist()


@SETUPS
@TREES
@pytest.mark.parametrize("kind", [StreamingLLM, KeyDiff])
def test_memory_never_exceeds_budget_and_chunk(setup: Setup, no_tree: bool, kind: type) -> None:
    """KeyDiff's N + B, with a prompt that the pool could not hold."""
    world = world_of(setup, hard(kind), no_tree=no_tree)
    req = world.request("r", PROMPT)
    before = np.zeros(0)
    for _ in chunks(world, req):
        assert len(held(world, req)) <= BUDGET
        # What was kept stays where it is, and evicted positions stay evicted positions.
        after = world.row(req)[: len(before)]
        assert ((after == before) | (after == -1)).all()
        before = world.row(req).copy()
    peak = world.total - world.lowest_free()
    assert BUDGET < peak <= BUDGET + CHUNK + setup.page
    assert len(held(world, req)) <= BUDGET
    for i in range(20):
        steps(world, req, 1, first=100 + i)
        assert used(world) <= BUDGET + 2 * setup.page


@SETUPS
@TREES
def test_the_prompt_stays_where_no_policy_asks_for_it(setup: Setup, no_tree: bool) -> None:
    """Also where no tree owns it, whatever a policy wants to give up."""
    policy = StreamingLLM(budget=8, slack=0, recent=1)
    world = world_of(setup, policy, no_tree=no_tree)
    req = start(world, prompt=PROMPT[:32])
    steps(world, req, 16, first=32)
    assert held(world, req)[:32] == list(range(32))
    assert len(held(world, req)) <= 32 + 2 * setup.page

    world = World(setup, no_tree=True)
    req = start(world, prompt=PROMPT[:32])
    world.controller.after_decode([req])
    world.evictor.waiting["r"] = [Eviction(8, 8)]
    world.step(req, 32)
    assert world.controller.after_decode([req]) == 0
