# SPDX-License-Identifier: Apache-2.0
"""Policies with ``when=short``: SGLang's pools run short, and its allocator asks."""

import dataclasses
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.streamingllm import StreamingLLM
from tests.eviction.rows import SETUPS, SINGLE, evicted, world_of
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import PROMPT, Pair, Setup, World
from tests.unit.test_ledger import lack
from tests.unit.test_pipeline import used

KEYDIFF = KeyDiff(budget=16, slack=0, recent=1, when="short")
OLDEST = StreamingLLM(budget=16, slack=0, recent=1, when="short")


def grown(world: World, name: str, length: int) -> Req:
    req = world.request(name, PROMPT)
    world.respond(req, [ord(name), *(50 + i % 40 for i in range(length))])
    return req


def begun(setup: Setup, policy: Evictor, *lengths: int, **options: Any) -> tuple[World, list[Req]]:
    """Requests that were seen by a poll."""
    world = world_of(setup, policy, **options)
    reqs = [grown(world, name, length) for name, length in zip("abc", lengths, strict=False)]
    world.controller.after_decode(reqs)
    return world, reqs


@SETUPS
def test_the_longest_gives_what_is_missing(setup: Setup) -> None:
    """And not a page more, nor before; the next one gives once the first is down to its budget."""
    world, (short, long) = begun(setup, OLDEST, 40, 80)
    for i in range(8):
        world.step(long, i)
        world.controller.after_decode([short, long])
    assert world.controller.stats.positions_evicted == lack(world, 0) == 0
    assert lack(world, 10) == -(-10 // setup.page) * setup.page
    assert evicted(world, short) == [] and len(evicted(world, long)) >= 10
    length = len(world.row(long))
    # More than the longest has to give.
    assert lack(world, length) >= length - 16
    assert length - len(evicted(world, long)) <= 16 + setup.page
    assert evicted(world, short) != []
    # Nobody has more.
    lack(world, 1000)
    assert lack(world, 1000) == 0
    for req in (short, long):
        assert len(world.row(req)) - len(evicted(world, req)) <= 16 + setup.page
        world.step(req)


def test_more_goes_than_is_missing_where_the_slack_is_more() -> None:
    """A shortage comes again with the next decode step."""
    world, _ = begun(SINGLE, dataclasses.replace(OLDEST, slack=12), 60)
    assert lack(world, 1) == 12


@pytest.mark.parametrize("policy", [OLDEST, KEYDIFF], ids=["oldest", "keydiff"])
def test_no_request_is_retracted_while_another_one_has_to_give(policy: Evictor) -> None:
    """Two responses grow until either alone would fill the pool."""
    world, reqs = begun(SINGLE, policy, 60, 70)
    for i in range(60):
        for req in reqs:
            world.step(req, i)
        world.controller.after_decode(reqs)
    assert used(world) <= world.total < sum(len(world.row(req)) for req in reqs)
    assert world.controller.stats.shortages > 0


@pytest.mark.parametrize("budget", [2, 30], ids=["below the prompt", "above it"])
def test_a_lasting_shortage_scores_a_row_once_for_slack_positions(budget: int) -> None:
    """SGLang misses more than all can give, at every step."""
    slack = 8
    world, reqs = begun(SINGLE, dataclasses.replace(KEYDIFF, budget=budget, slack=slack), 60, 70)
    for i in range(40):
        for req in reqs:
            world.step(req, i)
        lack(world, 1000)
        for req in reqs:
            held = len(world.row(req)) - len(evicted(world, req))
            assert held <= max(budget, len(PROMPT) + 1) + slack
    assert 0 < world.controller.stats.eviction_decisions <= len(reqs) * (1 + 40 // slack)


def test_sharing_comes_first() -> None:
    """Blocks of the ledger are exact copies, or nearly; positions are not."""
    setup = dataclasses.replace(SINGLE, when="short")
    world, (req,) = begun(setup, OLDEST, 60)
    world.propose(req, Pair(40, 20), Pair(48, 28))
    world.controller.after_decode([req])
    assert lack(world, 6) == 8
    assert evicted(world, req) == [] and world.controller.pipeline.saved == 8
    assert lack(world, 5) == 5 and len(evicted(world, req)) >= 5


def test_who_left_or_opted_out_is_not_asked() -> None:
    world, (gone, req) = begun(SINGLE, OLDEST, 60, 20)
    world.finish(gone)
    whole = world.request("whole", PROMPT, True)
    world.respond(whole, [7, *range(50)])
    world.controller.after_decode([req, whole])
    # First what the finished one left in the tree.
    lack(world, 1000)
    assert world.tree.evictable_size() == 0
    assert evicted(world, whole) == [] and len(evicted(world, req)) > 0
