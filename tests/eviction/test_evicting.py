# SPDX-License-Identifier: Apache-2.0
"""Evicts on SGLang's pools and rows: what may go, what comes back, what others see."""

import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.random_attention import RandomAttention
from sglang_reasoncache.eviction.policies.streamingllm import StreamingLLM
from tests.eviction.rows import PAGED, SETUPS, SINGLE, begun, evicted, steps, world_of
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import OUTPUT, PROMPT, Eviction, Pair, Setup, SlowMeter, World
from tests.unit.test_pipeline import arrive

ALIASED = Setup(page=1, block=4, slots=200, publish="aliased")
#: Positions of :func:`start`'s request whose KV is there, all but the first of them its own.
WRITTEN = len(PROMPT) + OUTPUT


def evict(world: World, req: Req, *evictions: Eviction) -> int:
    """The policy gives up ``evictions`` at the next poll; returns slots that came back."""
    world.evictor.waiting[req.rid] = list(evictions)
    return world.controller.after_decode([req])


def test_policies_are_described_with_their_options() -> None:
    world = world_of(SINGLE, StreamingLLM(budget=10_000, when="short"))
    [options] = world.controller.describe()["evictors"]
    assert (options["name"], options["budget"], options["when"]) == ("policy0", 10_000, "short")


# -- shared slots ---------------------------------------------------------------


@pytest.mark.parametrize("setup", [SINGLE, ALIASED, PAGED], ids=str)
def test_a_budget_counts_slots(setup: Setup) -> None:
    """What sharing saves need not be given up, and a slot goes with all of its names."""
    budget = WRITTEN + 6
    world, req = begun(setup, StreamingLLM(budget=budget, slack=1, recent=1))
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    before = []
    for i in range(40):
        steps(world, req, 1, first=i)
        row = world.row(req)
        slots = len(set(row[row >= 0].tolist()))
        assert slots <= budget + 1
        if not evicted(world, req):
            assert slots == len(row) - 4
            before.append(len(row))
        # The older name of a slot stays as long as the newer one.
        assert (row[8:12] == row[20:24]).all()
    assert before[-1] == budget + 4 + 1, "evicted while the slots were within the budget"
    # All but the prompt, which stays, up to the newest one that is left.
    gone = evicted(world, req)
    assert gone == list(range(gone[0], gone[-1] + 1)) and gone[-1] > 23
    totals = world.controller.stats
    assert totals.positions_evicted - totals.slots_freed_by_eviction == 4
    assert world.controller.pipeline.saved == 0


@SETUPS
def test_a_retracted_row_gives_up_nothing_that_sharing_saved(setup: Setup) -> None:
    """Its blocks are applied again some polls later, and policies do not run before."""
    policy = RandomAttention(budget=WRITTEN - 2, slack=4, recent=4)
    world = world_of(setup, policy, meter_type=SlowMeter)
    arrive(world, True)
    req = world.start()
    world.propose(req, Pair(24, 8), Pair(20, 12))
    world.controller.after_decode([req])
    steps(world, req, 8)
    gone = evicted(world, req)
    assert world.controller.pipeline.saved == 8
    world.retract(req)
    world.prefill(req)
    req.output_ids.append(9)
    for arrived in (False, False, False, True):
        arrive(world, arrived)
        world.controller.after_decode([req])
        assert evicted(world, req) == gone
    assert world.controller.pipeline.saved == 8
    # Later it runs as before.
    steps(world, req, 20)
    assert len(evicted(world, req)) > len(gone)


@pytest.mark.parametrize("run", [Eviction(21, 1), Eviction(9, 2)], ids=["destination", "source"])
def test_an_eviction_while_its_block_is_being_measured(run: Eviction) -> None:
    """The block comes too late; its stale slots are neither shared nor released."""
    world, req = begun(SINGLE, meter_type=SlowMeter)
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 0
    assert evict(world, req, run) == run.length
    # Its slots are somebody else's by now.
    other = world.start("other", first=300)
    row = world.row(other).copy()
    arrive(world, True)
    world.controller.after_decode([req, other])
    assert world.controller.stats.refusals["evicted"] == 1
    assert evicted(world, req) == list(range(run.start, sum(run)))
    assert (world.row(other) == row).all()


# -- ends of a row ----------------------------------------------------------------


# -- real policies ----------------------------------------------------------------


def test_a_budget_below_the_prompt_is_not_asked_for_each_time() -> None:
    world, req = begun(SINGLE, StreamingLLM(budget=2, slack=8, recent=1))
    steps(world, req, 16)
    assert world.controller.stats.eviction_decisions <= 1 + 16 // 8
    assert evicted(world, req)[0] == len(PROMPT)


@pytest.mark.parametrize(("order", "decisions"), [(1, 2), (-1, 1)])
def test_policies_in_sequence(order: int, decisions: int) -> None:
    """The second one sees what the first one left."""
    both = [kind(budget=b, slack=1, recent=1) for kind, b in ((StreamingLLM, 20), (KeyDiff, 16))]
    world, req = begun(SINGLE, *both[::order])
    assert WRITTEN - len(evicted(world, req)) == 16
    assert world.controller.stats.eviction_decisions == decisions
