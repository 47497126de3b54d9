# SPDX-License-Identifier: Apache-2.0
"""Evicts on SGLang's pools and rows: what may go, what comes back, what others see."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.random_attention import RandomAttention
from sglang_reasoncache.eviction.policies.streamingllm import StreamingLLM
from sglang_reasoncache.sharing.measure import BlockMeter
from tests.eviction.rows import PAGED, SETUPS, SINGLE, begun, evicted, steps, world_of
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import (
    LAYERS,
    OUTPUT,
    PROMPT,
    Eviction,
    Pair,
    Setup,
    World,
    decode,
    finish,
    prefill,
    propose,
    respond,
    retract,
    start,
)
from tests.unit.test_pipeline import SlowMeter, arrive, state, used

ALIASED = Setup(page=1, block=4, slots=200, publish="aliased")
#: Positions of :func:`start`'s request whose KV is there, all but the first of them its own.
WRITTEN = len(PROMPT) + OUTPUT


def evict(world: World, req: Req, *evictions: Eviction) -> int:
    """The policy gives up ``evictions`` at the next poll; returns slots that came back."""
    world.evictor.waiting[req.rid] = list(evictions)
    return world.controller.after_decode([req])


def test_an_evicted_slot_is_free_at_once() -> None:
    world, req = begun(SINGLE)
    before, row = used(world), world.row(req).copy()
    assert evict(world, req, Eviction(10, 3), Eviction(20, 1)) == 4
    assert used(world) == before - 4
    gone = evicted(world, req)
    assert gone == [10, 11, 12, 20]
    assert set(row[gone].tolist()) <= set(world.free_pages().tolist())
    kept = world.row(req) >= 0
    assert (world.row(req)[kept] == row[kept]).all()
    seen = world.controller.describe()
    assert seen["positions_evicted_now"] == seen["slots_saved_now"] == 4
    assert seen["totals"]["positions_evicted"] == seen["totals"]["slots_freed_by_eviction"] == 4
    finish(world, req)
    assert world.controller.describe(details=True)["recent"][0]["evicted_positions"] == 4


@SETUPS
def test_what_may_not_go_stays(setup: Setup) -> None:
    """Of the prompt nothing, nor the newest position, nor a part of a page; and each position once."""
    world, req = begun(setup)
    other = start(world, "other", first=300)
    row, before = world.row(other).copy(), used(world)
    low, high = len(PROMPT) // setup.page * setup.page, (WRITTEN - 1) // setup.page * setup.page
    evict(world, req, Eviction(0, WRITTEN))
    assert evicted(world, req) == list(range(low, high))
    assert used(world) == before - (high - low)
    assert evict(world, req, Eviction(0, WRITTEN)) == 0
    assert (world.row(other) == row).all()
    for i in range(9):
        decode(world, req, i)


@dataclass(frozen=True)
class Failing(StreamingLLM):
    def scores(self, view: View) -> torch.Tensor:
        raise KeyError("oops")


def test_a_policy_that_fails_ends_evicting_and_no_server() -> None:
    world, req = begun(SINGLE, Failing(budget=16, slack=0, recent=1))
    assert world.controller.report.disabled == "KeyError: 'oops'"
    steps(world, req, 3)
    assert evicted(world, req) == []


def test_policies_are_described_with_their_options() -> None:
    world = world_of(SINGLE, StreamingLLM(budget=10_000, when="short"))
    [options] = world.controller.describe()["evictors"]
    assert (options["name"], options["budget"], options["when"]) == ("policy0", 10_000, "short")


# -- shared slots ---------------------------------------------------------------


@pytest.mark.parametrize("publish", [SINGLE, ALIASED])
@pytest.mark.parametrize(
    ("run", "freed"),
    [(Eviction(20, 4), 0), (Eviction(8, 4), 0), (Eviction(7, 6), 2), (Eviction(6, 20), 16)],
    ids=["destination", "source", "source and more", "both"],
)
def test_a_shared_slot_outlives_an_evicted_name(publish: Setup, run: Eviction, freed: int) -> None:
    world, req = begun(publish)
    propose(world, req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    before, row = used(world), world.row(req).copy()
    assert evict(world, req, run) == freed
    assert used(world) == before - freed
    now = world.row(req)
    kept = np.delete(np.arange(len(row)), slice(run.start, sum(run)))
    assert (now[kept] == row[kept]).all()
    assert world.controller.saved_positions == 4 + freed


@pytest.mark.parametrize("setup", [SINGLE, ALIASED, PAGED], ids=str)
def test_a_budget_counts_slots(setup: Setup) -> None:
    """What sharing saves need not be given up, and a slot goes with all of its names."""
    budget = WRITTEN + 6
    world, req = begun(setup, StreamingLLM(budget=budget, slack=1, recent=1))
    propose(world, req, Pair(20, 8))
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
@pytest.mark.parametrize("meter", [BlockMeter, SlowMeter])
def test_a_retracted_row_gives_up_nothing_that_sharing_saved(
    setup: Setup, meter: type[BlockMeter]
) -> None:
    """Its blocks are applied again some polls later, and policies do not run before."""
    world = world_of(
        setup, RandomAttention(budget=WRITTEN - 2, slack=4, recent=4), meter_type=meter
    )
    world.meter.arrived = True  # type: ignore[attr-defined]
    req = start(world)
    propose(world, req, Pair(24, 8), Pair(20, 12))
    world.controller.after_decode([req])
    steps(world, req, 8)
    gone, live = evicted(world, req), world.controller.pipeline.saved
    assert live == 8
    retract(world, req)
    prefill(world, req)
    written = np.arange(len(world.row(req)))
    assert (state(world, req).slot_aliases.of(written) == written).all()
    req.output_ids.append(9)
    world.meter.arrived = False  # type: ignore[attr-defined]
    asked = world.controller.stats.eviction_decisions
    for _ in range(3):
        world.controller.after_decode([req])
        assert evicted(world, req) == gone
    assert world.controller.stats.eviction_decisions == asked or meter is BlockMeter
    world.meter.arrived = True  # type: ignore[attr-defined]
    world.controller.after_decode([req])
    assert evicted(world, req) == gone and world.controller.pipeline.saved == live
    assert state(world, req).slot_aliases.of(written)[24:28].tolist() == [8, 9, 10, 11]
    # Later it runs as before.
    steps(world, req, 20)
    assert len(evicted(world, req)) > len(gone)


def test_what_shares_a_slot_with_a_sink_stays() -> None:
    world, req = begun(SINGLE, StreamingLLM(budget=26, slack=1, recent=4, sinks=16))
    propose(world, req, Pair(20, 8), Pair(24, 12))
    steps(world, req, 16)
    totals = world.controller.stats
    assert totals.positions_evicted == totals.slots_freed_by_eviction > 0


def test_blocks_over_evicted_positions_are_refused() -> None:
    world, req = begun(SINGLE)
    evict(world, req, Eviction(9, 1), Eviction(24, 1))
    # (20, 6) reads the evicted position at 9, (21, 10) writes the one at 24, (14, 10) meets neither.
    propose(world, req, Pair(20, 6), Pair(14, 10), Pair(21, 10))
    assert world.controller.after_decode([req]) == 4
    assert world.controller.stats.refusals == {"evicted": 2}
    assert evicted(world, req) == [9, 24]


@pytest.mark.parametrize("run", [Eviction(21, 1), Eviction(9, 2)], ids=["destination", "source"])
def test_an_eviction_while_its_block_is_being_measured(run: Eviction) -> None:
    """The block comes too late; its stale slots are neither shared nor released."""
    world, req = begun(SINGLE, meter_type=SlowMeter)
    propose(world, req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 0
    assert evict(world, req, run) == run.length
    # Its slots are somebody else's by now.
    other = start(world, "other", first=300)
    row = world.row(other).copy()
    arrive(world, True)
    world.controller.after_decode([req, other])
    assert world.controller.stats.refusals["evicted"] == 1
    assert evicted(world, req) == list(range(run.start, sum(run)))
    assert (world.row(other) == row).all()


# -- ends of a row ----------------------------------------------------------------


@pytest.mark.parametrize("setup", [SINGLE, ALIASED, PAGED], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_nothing_behind_an_evicted_position_is_published(setup: Setup, grouped: bool) -> None:
    world, req = begun(setup)
    evict(world, req, Eviction(16, 4))
    for i in range(6):
        decode(world, req, i)
    if grouped:
        world.allocator.free_group_begin()
    finish(world, req)
    if grouped:
        world.allocator.free_group_end()
    tokens = [*req.origin_input_ids, *req.output_ids, 5, 6]
    follow_up = world.request("next", tokens)
    follow_up.init_next_round_input(world.tree)
    assert follow_up.prefix_len == 16
    assert used(world) == world.tree.evictable_size() == 16
    prefill(world, follow_up)


@SETUPS
def test_a_retracted_request_evicts_the_same_again(setup: Setup) -> None:
    world, req = begun(setup)
    propose(world, req, Pair(24, 8))
    world.controller.after_decode([req])
    evict(world, req, Eviction(12, 4), Eviction(20, 4))
    assert world.controller.saved_positions == 12
    retract(world, req)
    assert world.controller.saved_positions == 0
    prefill(world, req)
    req.output_ids.append(9)
    assert evicted(world, req) == []
    before = used(world)
    # Evictions at once, the block a poll later, when it has been measured.
    assert world.controller.after_decode([req]) == 8
    assert evicted(world, req) == [*range(12, 16), *range(20, 24)]
    assert world.controller.after_decode([req]) == 4
    assert used(world) == before - 12
    assert world.row(req)[24:28].tolist() == world.row(req)[8:12].tolist()


def test_evictions_that_the_tree_owns_by_now_stay_undone() -> None:
    """While a request waited, another one with its text was published, and it reads that."""
    world, req = begun(SINGLE)
    evict(world, req, Eviction(10, 10))
    retract(world, req)
    other = world.request("same", [*req.origin_input_ids, *req.output_ids][:16])
    prefill(world, other)
    prefill(world, req)
    assert req.kv.cache_protected_len == 16
    req.output_ids.append(9)
    assert world.controller.after_decode([req]) == 4
    assert evicted(world, req) == [16, 17, 18, 19]
    other.output_ids.append(1)


def test_an_opted_out_request_is_never_asked_about() -> None:
    world = world_of(SINGLE, StreamingLLM(budget=10, slack=1, recent=1))
    req = world.request("r", PROMPT, True)
    respond(world, req, [1, *range(30)])
    assert world.controller.after_decode([req]) == 0
    assert evicted(world, req) == [] and world.controller.stats.eviction_decisions == 0


# -- real policies ----------------------------------------------------------------


@SETUPS
def test_a_budget_holds_from_step_to_step(setup: Setup) -> None:
    budget, slack = 20, 4
    world = world_of(setup, StreamingLLM(budget=budget, slack=slack, recent=1))
    req = world.request("r", PROMPT)
    respond(world, req, [1])
    for i in range(80):
        steps(world, req, 1, first=i)
        row = world.row(req)
        assert len(row) - len(evicted(world, req)) <= budget + slack + setup.page
        assert used(world) <= budget + slack + 2 * setup.page
    # The prompt's pages and the newest positions are left.
    kept, owned = np.flatnonzero(row >= 0).tolist(), req.kv.cache_protected_len
    assert kept[:owned] == list(range(owned))
    assert kept[-8:] == list(range(len(row) - 8, len(row)))
    assert world.controller.stats.eviction_decisions <= 80 / slack


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


def test_keys_are_those_of_the_held_positions() -> None:
    """Of every layer, through shared slots, and what was evicted is not among them."""
    seen: list[tuple[View, list[torch.Tensor]]] = []

    @dataclass(frozen=True)
    class Watching(KeyDiff):
        def scores(self, view: View) -> torch.Tensor:
            seen.append((view, [layer.stored() for layer in view.layers]))
            return super().scores(view)

    world, req = begun(SINGLE, Watching(budget=WRITTEN + 2, slack=0, recent=1))
    propose(world, req, Pair(24, 14))
    steps(world, req, 10)
    gone = evicted(world, req)
    steps(world, req, 1)
    view, keys = seen[-1]
    assert gone and view.held.tolist() == [at for at in range(view.written) if at not in gone]
    kept = np.isin(view.held, evicted(world, req), invert=True)
    slots = torch.from_numpy(world.row(req)[view.held[kept]]).long()
    for layer in range(LAYERS):
        expected = world.pool.k_buffer[layer][slots].float()
        assert torch.equal(keys[layer][torch.from_numpy(kept)], expected)
