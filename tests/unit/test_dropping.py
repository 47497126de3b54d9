# SPDX-License-Identifier: Apache-2.0
"""Drops on SGLang's pools and rows: what is refused, what comes back, what others see."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.policies.contract import RequestView
from sglang_reasoncache.policies.keydiff import KeyDiff, similarity
from sglang_reasoncache.policies.random_eviction import RandomEviction
from sglang_reasoncache.policies.registry import NamedPolicy
from sglang_reasoncache.policies.streamingllm import StreamingLLM
from sglang_reasoncache.sharing.decision import Drop, DropRefusal
from sglang_reasoncache.sharing.measure import BlockMeter
from tests.property.world import LAYERS, Pair, Setup, World
from tests.unit.test_pipeline import (
    OUTPUT,
    PROMPT,
    SlowMeter,
    arrive,
    assert_empty,
    decode,
    finish,
    prefill,
    propose,
    start,
    state,
    used,
)

pytestmark = pytest.mark.usefixtures("published_config")

SINGLE = Setup(page=1, block=4, slots=120, publish="exact")
ALIASED = Setup(page=1, block=4, slots=120, publish="aliased")
PAGED = Setup(page=4, block=4, slots=160, publish="exact")
#: Positions of :func:`start`'s request whose KV is there, all but the first of them its own.
WRITTEN = len(PROMPT) + OUTPUT


def drop(world: World, req: Req, *drops: object) -> int:
    """The policy answers ``drops`` at the next look; returns slots that came back."""
    world.evictor.waiting[req.rid] = list(drops)
    return world.controller.after_decode([req])


def refusals(world: World) -> dict[str, int]:
    return dict(world.controller.stats.drop_refusals)


def holes(world: World, req: Req) -> list[int]:
    return np.flatnonzero(world.row(req) < 0).tolist()


def test_a_dropped_slot_is_free_at_once() -> None:
    world = World(SINGLE)
    req = start(world)
    before, row = used(world), world.row(req).copy()
    assert drop(world, req, Drop(10, 3), Drop(20, 1)) == 4
    assert used(world) == before - 4
    assert holes(world, req) == [10, 11, 12, 20]
    assert set(row[[10, 11, 12, 20]].tolist()) <= set(world.free_pages().tolist())
    kept = world.row(req) >= 0
    assert (world.row(req)[kept] == row[kept]).all()
    seen = world.controller.describe()
    assert seen["positions_dropped_now"] == seen["slots_saved_now"] == 4
    assert seen["totals"]["positions_dropped"] == seen["totals"]["slots_freed_by_drops"] == 4
    finish(world, req)
    assert world.controller.describe()["recent"][0]["dropped_positions"] == 4
    assert_empty(world)


HOSTILE = [
    (DropRefusal.MALFORMED, [None, 7, (10, 3), "10", Pair(10, 3), Drop(10, 0), Drop(10, -4)]),
    (DropRefusal.MALFORMED, [Drop(-3, 2), Drop(10.0, 2), Drop(10, 2.0), Drop(True, 9)]),  # type: ignore[arg-type]
    (DropRefusal.MALFORMED, [Drop("10", 1), Drop(math.nan, 1)]),  # type: ignore[arg-type]
    (DropRefusal.TREE_OWNED, [Drop(0, 1), Drop(len(PROMPT) - 1, 4), Drop(0, 10**30)]),
    (DropRefusal.NOT_WRITTEN, [Drop(WRITTEN, 1), Drop(10, 10**30), Drop(10**30, 1)]),
    (DropRefusal.NEWEST, [Drop(WRITTEN - 1, 1), Drop(10, WRITTEN - 10)]),
]


@pytest.mark.parametrize(("refusal", "drops"), HOSTILE)
def test_nonsense_is_refused_by_name(refusal: DropRefusal, drops: list[object]) -> None:
    """Slots of others, unwritten positions, things that are no drops: counted, and nothing moves."""
    world = World(SINGLE)
    req, other = start(world), start(world, "other", first=300)
    rows = world.row(req).copy(), world.row(other).copy()
    before = used(world)
    for one in drops:
        assert drop(world, req, one) == 0
    assert refusals(world) == {refusal.value: len(drops)}
    assert (world.row(req) == rows[0]).all() and (world.row(other) == rows[1]).all()
    assert used(world) == before
    # What is right in the same answer is applied.
    assert drop(world, req, *drops, Drop(12, 2)) == 2
    finish(world, req)
    finish(world, other)
    assert_empty(world)


def test_a_position_is_dropped_once() -> None:
    world = World(SINGLE)
    req = start(world)
    assert drop(world, req, Drop(10, 4), Drop(12, 4), Drop(10, 4), Drop(14, 1)) == 5
    assert drop(world, req, Drop(9, 2)) == 0
    assert refusals(world) == {"already_dropped": 3}
    finish(world, req)
    assert_empty(world)


@pytest.mark.parametrize("run", [Drop(9, 4), Drop(8, 3), Drop(10, 2), Drop(8, 6)])
def test_parts_of_pages_are_refused(run: Drop) -> None:
    world = World(PAGED)
    req = start(world)
    assert drop(world, req, run) == 0
    assert refusals(world) == {"part_of_page": 1}
    assert drop(world, req, Drop(8, 8)) == 8
    assert holes(world, req) == list(range(8, 16))
    # Every later token finds its place: the page of the newest position is there.
    for i in range(9):
        decode(world, req, i)
    finish(world, req)
    assert_empty(world)


def endless() -> Iterable[Drop]:
    for _ in itertools.count():
        yield Drop(0, 1)


class Failing:
    """A policy of somebody else's that goes wrong in ``how`` it answers."""

    needs: frozenset[str] = frozenset()

    def __init__(self, how: str) -> None:
        self.how = how
        self._asked = 0

    @property
    def slack(self) -> Any:
        self._asked += 1
        return np.array([1, 2]) if self._asked > 1 and self.how == "has another slack" else 1

    def excess(self, written: int, held: int) -> int:
        return None if self.how == "has no excess" else 3  # type: ignore[return-value]

    def drops(self, view: RequestView, excess: int) -> Any:
        if self.how == "raises":
            raise KeyError("oops")
        if self.how == "is no list":
            return 5
        if self.how == "is endless":
            return endless()
        if self.how == "raises half way":
            return (Drop(10 // (3 - i), 1) for i in range(5))
        if self.how == "exits":
            raise SystemExit(1)
        if self.how == "answers half a drop":
            return [Drop.__new__(Drop)]
        if self.how == "answers a drop that raises":
            return [Raising(10, 1)]
        if self.how == "has another slack":
            return []
        view.held[:] = 0
        return [Drop(int(view.held[0]), 1)]


class Raising(Drop):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        ("raises", {"policy_failed": 1}),
        ("is no list", {"policy_failed": 1}),
        ("has no excess", {"policy_failed": 2}),
        ("raises half way", {"policy_failed": 1}),
        ("is endless", {"tree_owned": WRITTEN + 1}),
        ("writes into its view", {"policy_failed": 1}),
        ("exits", {"policy_failed": 1}),
        ("answers half a drop", {"policy_failed": 1}),
        ("answers a drop that raises", {"malformed": 1}),
    ],
)
def test_a_policy_that_fails_harms_nobody(how: str, refused: dict[str, int]) -> None:
    world = World(SINGLE, evictors=[NamedPolicy("failing", Failing(how))])
    req = start(world)
    row = world.row(req).copy()
    world.controller.stats.drop_refusals.clear()
    # Not asked again before the slack is written.
    decode(world, req)
    assert world.controller.after_decode([req]) == 0
    assert world.controller.after_decode([req]) == 0
    [(reason, count)] = refused.items()
    assert refusals(world) == {reason: count + (1 if how == "is endless" else 0)}
    assert (world.row(req)[: len(row)] == row).all()
    finish(world, req)
    assert_empty(world)


def test_slack_is_asked_for_once() -> None:
    world = World(SINGLE, evictors=[NamedPolicy("failing", Failing("has another slack"))])
    req = start(world)
    for i in range(3):
        decode(world, req, i)
        world.controller.after_decode([req])
    assert world.controller.stats.drop_decisions > 1 and refusals(world) == {}
    finish(world, req)
    assert_empty(world)


def test_policies_are_described_as_they_were_at_the_start() -> None:
    @dataclass(frozen=True)
    class Odd(StreamingLLM):
        what: Any = None
        later: int = field(init=False)

    odd = Odd(budget=10_000, what=[3])
    described = World(SINGLE, evictors=[NamedPolicy("odd", odd)]).controller.describe()
    [options] = described["evictors"]
    assert json.loads(json.dumps(options)) == options
    assert (options["name"], options["budget"], options["what"]) == ("odd", 10_000, "[3]")
    assert "later" not in options


def test_what_a_policy_does_to_its_view_stays_there() -> None:
    """Of two policies and of what is read for one."""

    class Shuffling(Failing):
        def drops(self, view: RequestView, excess: int) -> list[Drop]:
            seen = view.keys.stored(0)
            candidates = view.candidates()
            candidates[:] = candidates[::-1].copy()
            base = view.held.base
            assert base is not None
            base[:] = 0
            assert torch.equal(view.keys.stored(0), seen)
            return [Drop(int(candidates[0]), 1)]

    world = World(SINGLE, evictors=[NamedPolicy("shuffling", Shuffling(""))])
    req = start(world)
    assert refusals(world) == {} and holes(world, req) == [WRITTEN - 2]
    finish(world, req)
    assert_empty(world)


# -- shared slots ---------------------------------------------------------------


@pytest.mark.parametrize("publish", [SINGLE, ALIASED])
@pytest.mark.parametrize(
    ("run", "freed"),
    [(Drop(20, 4), 0), (Drop(8, 4), 0), (Drop(7, 6), 2), (Drop(6, 20), 16)],
    ids=["destination", "source", "source and more", "both"],
)
def test_a_shared_slot_outlives_a_dropped_name(publish: Setup, run: Drop, freed: int) -> None:
    world = World(publish)
    req = start(world)
    propose(world, req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    before, row = used(world), world.row(req).copy()
    assert drop(world, req, run) == freed
    assert used(world) == before - freed
    now = world.row(req)
    kept = np.delete(np.arange(len(row)), slice(run.start, run.end))
    assert (now[kept] == row[kept]).all()
    assert world.controller.saved_positions == 4 + freed
    finish(world, req)
    assert_empty(world)


@pytest.mark.parametrize("setup", [SINGLE, ALIASED, PAGED], ids=str)
def test_a_budget_counts_slots(setup: Setup) -> None:
    """What sharing saves need not be given up, and a slot goes with all of its names."""
    budget = WRITTEN + 6
    evictor = StreamingLLM(budget=budget, slack=1, recent=1)
    world = World(setup, evictors=[NamedPolicy("streamingllm", evictor)])
    req = start(world)
    propose(world, req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    before = []
    for i in range(40):
        decode(world, req, i)
        world.controller.after_decode([req])
        row = world.row(req)
        slots = len(set(row[row >= 0].tolist()))
        assert slots <= budget + 1
        if not holes(world, req):
            assert slots == len(row) - 4
            before.append(len(row))
        # The older name of a slot stays as long as the newer one.
        assert (row[8:12] == row[20:24]).all()
    assert before[-1] == budget + 4 + 1, (
        "nothing was dropped while the slots were within the budget"
    )
    # All but the prompt, which stays, up to the newest one that is left.
    gone = holes(world, req)
    assert gone == list(range(gone[0], gone[-1] + 1)) and gone[-1] > 23
    totals = world.controller.stats
    assert totals.positions_dropped - totals.slots_freed_by_drops == 4
    assert refusals(world) == {} and world.controller.live_positions == 0
    finish(world, req)
    assert_empty(world)


@pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)
@pytest.mark.parametrize("meter", [BlockMeter, SlowMeter])
def test_a_retracted_row_gives_up_nothing_that_sharing_saved(
    setup: Setup, meter: type[BlockMeter]
) -> None:
    """Its blocks are applied again some looks later, and policies are not asked before."""
    evictor = RandomEviction(budget=WRITTEN - 2, slack=4, recent=4)
    world = World(setup, meter, evictors=[NamedPolicy("random", evictor)])
    arrive_if_slow(world, True)
    req = start(world)
    propose(world, req, Pair(24, 8), Pair(20, 12))
    world.controller.after_decode([req])
    for i in range(8):
        decode(world, req, i)
        world.controller.after_decode([req])
    gone, live = holes(world, req), world.controller.live_positions
    assert live == 8
    release_kv_cache(req, world.tree, checkpoint=False)
    req.reset_for_retract()
    prefill(world, req)
    written = np.arange(len(world.row(req)))
    assert (state(world, req).places.of(written) == written).all()
    req.output_ids.append(9)
    arrive_if_slow(world, False)
    asked = world.controller.stats.drop_decisions
    for _ in range(3):
        world.controller.after_decode([req])
        assert holes(world, req) == gone
    assert world.controller.stats.drop_decisions == asked or meter is BlockMeter
    arrive_if_slow(world, True)
    world.controller.after_decode([req])
    assert holes(world, req) == gone and world.controller.live_positions == live
    assert state(world, req).places.of(written)[24:28].tolist() == [8, 9, 10, 11]
    # Later it is asked as before.
    for i in range(20):
        decode(world, req, i)
        world.controller.after_decode([req])
    assert len(holes(world, req)) > len(gone) and refusals(world) == {}
    finish(world, req)
    assert_empty(world)


def arrive_if_slow(world: World, yes: bool) -> None:
    if isinstance(world.meter, SlowMeter):
        arrive(world, yes)


def test_what_shares_a_slot_with_a_sink_stays() -> None:
    evictor = StreamingLLM(budget=26, slack=1, recent=4, sinks=16)
    world = World(SINGLE, evictors=[NamedPolicy("streamingllm", evictor)])
    req = start(world)
    propose(world, req, Pair(20, 8), Pair(24, 12))
    for i in range(16):
        decode(world, req, i)
        world.controller.after_decode([req])
    totals = world.controller.stats
    assert totals.positions_dropped == totals.slots_freed_by_drops > 0
    finish(world, req)
    assert_empty(world)


def test_blocks_over_holes_are_refused() -> None:
    world = World(SINGLE)
    req = start(world)
    drop(world, req, Drop(9, 1), Drop(24, 1))
    # (20, 6) reads the hole at 9, (21, 10) writes the one at 24, (14, 10) meets neither.
    propose(world, req, Pair(20, 6), Pair(14, 10), Pair(21, 10))
    assert world.controller.after_decode([req]) == 4
    assert world.controller.stats.refusals == {"dropped": 2}
    assert holes(world, req) == [9, 24]
    finish(world, req)
    assert_empty(world)


@pytest.mark.parametrize("run", [Drop(21, 1), Drop(9, 2)], ids=["destination", "source"])
def test_a_drop_while_its_block_is_being_measured(run: Drop) -> None:
    """The block comes too late; its stale slots are neither shared nor released."""
    world = World(SINGLE, SlowMeter)
    arrive(world, False)
    req = start(world)
    propose(world, req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 0
    assert drop(world, req, run) == run.length
    # Its slots are somebody else's by now.
    other = start(world, "other", first=300)
    row = world.row(other).copy()
    arrive(world, True)
    world.controller.after_decode([req, other])
    assert world.controller.stats.refusals["dropped"] == 1
    assert holes(world, req) == list(range(run.start, run.end))
    assert (world.row(other) == row).all()
    finish(world, req)
    finish(world, other)
    assert_empty(world)


# -- ends of a row ----------------------------------------------------------------


@pytest.mark.parametrize("setup", [SINGLE, ALIASED, PAGED], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_nothing_behind_a_hole_is_published(setup: Setup, grouped: bool) -> None:
    world = World(setup)
    req = start(world)
    drop(world, req, Drop(16, 4))
    for i in range(6):
        decode(world, req, i)
    tokens = [*req.origin_input_ids, *req.output_ids]
    if grouped:
        world.allocator.free_group_begin()
    finish(world, req)
    if grouped:
        world.allocator.free_group_end()
    follow_up = world.request("next", [*tokens, 5, 6], False, None)
    follow_up.init_next_round_input(world.tree)
    assert follow_up.prefix_len == 16
    assert used(world) == world.tree.evictable_size() == 16
    prefill(world, follow_up)
    finish(world, follow_up)
    assert_empty(world)


@pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)
def test_an_aborted_row_gives_everything_back(setup: Setup) -> None:
    world = World(setup)
    req = start(world)
    drop(world, req, Drop(8, 4), Drop(16, 8))
    req.finished_reason = FINISH_ABORT("gone")
    release_kv_cache(req, world.tree, checkpoint=False)
    assert used(world) == world.tree.evictable_size()
    assert world.controller.saved_positions == 0
    assert_empty(world)


@pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)
def test_a_retracted_request_drops_the_same_again(setup: Setup) -> None:
    world = World(setup)
    req = start(world)
    propose(world, req, Pair(24, 8))
    world.controller.after_decode([req])
    drop(world, req, Drop(12, 4), Drop(20, 4))
    assert world.controller.saved_positions == 12
    release_kv_cache(req, world.tree, checkpoint=False)
    req.reset_for_retract()
    assert world.controller.saved_positions == 0
    prefill(world, req)
    req.output_ids.append(9)
    assert holes(world, req) == []
    before = used(world)
    # Drops at once, the block a look later, when it has been measured.
    assert world.controller.after_decode([req]) == 8
    assert holes(world, req) == [*range(12, 16), *range(20, 24)]
    assert world.controller.after_decode([req]) == 4
    assert used(world) == before - 12
    assert world.row(req)[24:28].tolist() == world.row(req)[8:12].tolist()
    assert refusals(world) == {}
    finish(world, req)
    assert_empty(world)


def test_drops_that_the_tree_owns_by_now_stay_undone() -> None:
    """While a request waited, another one with its text was published, and it reads that."""
    world = World(SINGLE)
    req = start(world)
    drop(world, req, Drop(10, 10))
    release_kv_cache(req, world.tree, checkpoint=False)
    req.reset_for_retract()
    other = world.request("same", [*req.origin_input_ids, *req.output_ids][:16], False, None)
    prefill(world, other)
    prefill(world, req)
    assert req.kv.cache_protected_len == 16
    req.output_ids.append(9)
    assert world.controller.after_decode([req]) == 4
    assert holes(world, req) == [16, 17, 18, 19]
    assert refusals(world) == {}
    other.output_ids.append(1)
    finish(world, other)
    finish(world, req)
    assert_empty(world)


def test_an_opted_out_request_is_never_asked_about() -> None:
    world = World(
        SINGLE, evictors=[NamedPolicy("streamingllm", StreamingLLM(budget=10, slack=1, recent=1))]
    )
    req = world.request("exact", PROMPT, True, None)
    prefill(world, req)
    req.output_ids.append(1)
    for i in range(30):
        decode(world, req, i)
    assert world.controller.after_decode([req]) == 0
    assert holes(world, req) == [] and world.controller.stats.drop_decisions == 0
    finish(world, req)
    assert_empty(world)


# -- real policies ----------------------------------------------------------------


@pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)
def test_a_budget_holds_from_step_to_step(setup: Setup) -> None:
    budget, slack = 20, 4
    evictor = StreamingLLM(budget=budget, slack=slack, recent=1)
    world = World(setup, evictors=[NamedPolicy("streamingllm", evictor)])
    req = world.request("r", PROMPT, False, None)
    prefill(world, req)
    req.output_ids.append(1)
    for i in range(80):
        decode(world, req, i)
        world.controller.after_decode([req])
        held = len(world.row(req)) - len(holes(world, req))
        assert held <= budget + slack + setup.page
        assert used(world) <= budget + slack + 2 * setup.page
    # The prompt's pages and the newest positions are left.
    kept = np.flatnonzero(world.row(req) >= 0)
    owned = req.kv.cache_protected_len
    assert kept[:owned].tolist() == list(range(owned))
    assert kept[-8:].tolist() == list(range(len(world.row(req)) - 8, len(world.row(req))))
    assert world.controller.stats.drop_decisions <= 80 / slack
    assert refusals(world) == {}
    finish(world, req)
    assert_empty(world)


def test_a_budget_below_the_prompt_is_not_asked_for_each_time() -> None:
    evictor = StreamingLLM(budget=2, slack=8, recent=1)
    world = World(SINGLE, evictors=[NamedPolicy("streamingllm", evictor)])
    req = start(world)
    for i in range(16):
        decode(world, req, i)
        world.controller.after_decode([req])
    assert world.controller.stats.drop_decisions <= 1 + 16 // 8
    assert holes(world, req)[0] == len(PROMPT)
    finish(world, req)
    assert_empty(world)


@pytest.mark.parametrize("first", ["streamingllm", "keydiff"])
def test_policies_in_sequence(first: str) -> None:
    """The second one sees what the first one left."""
    both = [
        NamedPolicy("streamingllm", StreamingLLM(budget=20, slack=1, recent=1)),
        NamedPolicy("keydiff", KeyDiff(budget=16, slack=1, recent=1)),
    ]
    world = World(SINGLE, evictors=both if first == "streamingllm" else both[::-1])
    req = start(world)
    assert WRITTEN - len(holes(world, req)) == 16
    assert world.controller.stats.drop_decisions == (2 if first == "streamingllm" else 1)
    finish(world, req)
    assert_empty(world)


def test_keys_are_those_of_the_held_positions() -> None:
    """Of every layer, through shared slots, and what was dropped is not among them."""
    seen: list[RequestView] = []

    class Watching(Failing):
        def drops(self, view: RequestView, excess: int) -> list[Drop]:
            seen.append(view)
            return [Drop(10, 2)] if len(seen) == 1 else []

    world = World(SINGLE, evictors=[NamedPolicy("watching", Watching(""))])
    req = start(world)
    propose(world, req, Pair(24, 14))
    assert world.controller.after_decode([req]) == 4
    decode(world, req)
    world.controller.after_decode([req])
    view = seen[-1]
    assert view.held.tolist() == [at for at in range(view.written) if at not in (10, 11)]
    slots = world.row(req)[view.held]
    for layer in range(LAYERS):
        expected = world.pool.k_buffer[layer][torch.from_numpy(slots).long()].float()
        assert torch.equal(view.keys.stored(layer), expected)
    scores = view.keys.token_scores(lambda keys: similarity(keys, "mean_raw"))
    by_layer = [similarity(view.keys.stored(layer), "mean_raw")[:, 0] for layer in range(LAYERS)]
    assert scores == pytest.approx(torch.stack(by_layer).mean(dim=0).double().numpy())
    with pytest.raises(RuntimeError, match="refused at start-up"):
        view.keys.unrotated(0)
    finish(world, req)
    assert_empty(world)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("setup", [SINGLE, PAGED], ids=str)
def test_dropped_kv_is_not_read(backend: str, setup: Setup) -> None:
    """Poison in every free slot, and what a hole could be mistaken for, changes nothing."""
    if backend == "native":
        from sglang_reasoncache.native import NativeUnavailable, library

        try:
            library()
        except NativeUnavailable as error:
            pytest.skip(str(error))
    world = World(setup)
    req = start(world)
    drop(world, req, Drop(8, 8), Drop(20, 4))
    row = world.row(req)
    kept = torch.from_numpy(row[row >= 0]).long()
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.full_like(b[0], math.nan) for b in (world.pool.k_buffer, world.pool.v_buffer)
    )
    keys[kept] = torch.randn(len(kept), 1, 4, generator=generator)
    values[kept] = torch.randn(len(kept), 1, 4, generator=generator)
    query = torch.randn(1, 2, 4, generator=generator)
    plan = plan_rows(
        world.rows.req_to_token,
        torch.tensor([req.kv.req_pool_idx]),
        torch.tensor([len(row)]),
        num_slots=len(keys),
        backend=backend,
    )
    kv = PagedKv(keys, values, None, backend=backend)
    found = decode_attention(query, kv, plan, scale=0.5)
    weights = (0.5 * query[0] @ keys[kept, 0].T).softmax(dim=1)
    torch.testing.assert_close(found[0], weights @ values[kept, 0])
    gathered, _ = gather_kv(kv, plan.kv_indices, plan.shift, torch.float32)
    assert torch.equal(gathered[0], keys[kept, 0])
    finish(world, req)
    assert_empty(world)
