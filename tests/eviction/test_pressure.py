# SPDX-License-Identifier: Apache-2.0
"""Policies that act only while the pool is short, on SGLang's pools."""

import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.eviction.controller import PoolPressure, pool_use
from sglang_reasoncache.eviction.policies.by_position import StreamingLLM
from sglang_reasoncache.eviction.policies.contract import NamedPolicy
from tests.eviction.rows import SETUPS, SINGLE, world_of
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import PROMPT, Pair, Setup, World, decode, finish, propose, respond
from tests.unit.test_pipeline import state, used


def short(when: float, until: float | None = None) -> StreamingLLM:
    return StreamingLLM(budget=16, slack=0, recent=1, when=when, until=until)


def use(world: World) -> float:
    return pool_use(world.allocator, world.tree)


def grow(world: World, name: str, length: int) -> Req:
    req = world.request(name, PROMPT)
    respond(world, req, [ord(name), *(50 + i % 40 for i in range(length))])
    return req


def evicted(world: World, req: Req) -> int:
    return 0 if state(world, req) is None else state(world, req).evicted.count


@SETUPS
def test_nothing_goes_before_the_pool_is_short(setup: Setup) -> None:
    world = world_of(setup, short(0.7, 0.5))
    req, other = grow(world, "a", 90), grow(world, "b", 30)
    world.controller.after_decode([req, other])
    assert use(world) < 0.7
    assert evicted(world, req) == evicted(world, other) == 0
    for i in range(20):
        decode(world, other, i)
    assert use(world) > 0.7
    freed = world.controller.after_decode([other, req])
    # The longest gives first, and that is enough.
    assert freed == evicted(world, req) > 60
    assert evicted(world, other) == 0
    assert use(world) <= 0.5


def test_it_stops_later_than_it_began() -> None:
    """Once begun, more go until the lower bound is reached, though the upper one was passed."""
    world = world_of(SINGLE, short(0.7, 0.3))
    reqs = [grow(world, name, length) for name, length in (("a", 50), ("b", 45), ("c", 44))]
    assert use(world) > 0.7
    world.controller.after_decode(reqs)
    assert all(evicted(world, req) > 0 for req in reqs)
    assert use(world) < 0.3
    for i in range(60):
        # Asked now, it would find that it may stop; so it does not act again below 0.7.
        decode(world, reqs[0], i)
        world.controller.after_decode(reqs[:1])
        if use(world) > 0.35:
            break
    else:
        pytest.fail("the request was kept to its budget below the lower bound")


#: What happens instead of a question whether the policy may act.
POLL, FLUSH = "poll", "flush"


@pytest.mark.parametrize(
    "steps",
    [
        [(0.7, 0), (0.71, 1), (0.6, 1), (0.51, 1), (0.5, 0), (0.6, 0), (0.7, 0)],
        [(0.9, 1), (0.4, 0), (0.9, 1)],
        # It ends, and begins, while nobody has too much: at a poll or a release.
        [(0.9, 1), (0.1, POLL), (0.65, 0), (0.8, POLL), (0.65, 1), (0.65, FLUSH), (0.65, 0)],
    ],
)
def test_hysteresis(steps: list[tuple[float, int | str]]) -> None:
    seen: list[float] = []
    pressure = PoolPressure([NamedPolicy("one", short(0.7, 0.5))], lambda: seen[-1])
    for share, expected in steps:
        seen.append(share)
        if expected == POLL:
            pressure.poll()
        elif expected == FLUSH:
            pressure.reset()
        else:
            assert pressure.lets("one") == bool(expected)


def test_what_filled_the_pool_is_gone() -> None:
    world = world_of(SINGLE, short(0.7, 0.1))
    first, second = grow(world, "a", 100), grow(world, "b", 40)
    world.controller.after_decode([first, second])
    assert evicted(world, first) > 0 and evicted(world, second) > 0
    finish(world, first)
    finish(world, second)
    # Evictable slots are not in use.
    assert use(world) == 0 < used(world)
    third = grow(world, "c", 60)
    world.controller.after_decode([third])
    assert 0.1 < use(world) < 0.7
    assert evicted(world, third) == 0


def test_a_flush_ends_it() -> None:
    world = world_of(SINGLE, short(0.6, 0.1))
    req = grow(world, "a", 120)
    world.controller.after_decode([req])
    for i in range(20):
        decode(world, req, i)
    pressure = world.controller.eviction._pressure
    assert pressure is not None and pressure.lets("policy0")
    world.controller.reset()
    assert not pressure.lets("policy0")


def test_policies_have_bounds_of_their_own() -> None:
    now = 0.8
    policies = (short(0.7), short(0.9), StreamingLLM(budget=16))
    named = [NamedPolicy(str(i), policy) for i, policy in enumerate(policies)]
    pressure = PoolPressure(named, lambda: now)
    assert [pressure.lets(name) for name in "012"] == [True, False, True]
    now = 0.67
    assert pressure.lets("0"), "5% of the pool is the default"
    now = 0.64
    assert not pressure.lets("0") and pressure.lets("2")


def test_sharing_comes_first() -> None:
    """What sharing frees in the same poll the evictor need not."""
    world = world_of(SINGLE, short(0.5))
    req = grow(world, "a", 60)
    world.controller.after_decode([req])
    propose(world, req, Pair(40, 20), Pair(48, 28))
    grow(world, "b", 100 - used(world) + 4)
    assert use(world) > 0.5
    world.controller.after_decode([req])
    assert world.allocator.row_of(req.kv.req_pool_idx).shared == 8
    assert evicted(world, req) == 0
