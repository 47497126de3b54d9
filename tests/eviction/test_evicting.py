# SPDX-License-Identifier: Apache-2.0
"""Tests evicting policies with SGLang's pools and block tables; ``tests/property`` tests random evictions."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import checkpoint_kv_cache

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.random_attention import RandomAttention
from sglang_reasoncache.eviction.policies.streamingllm import StreamingLLM
from sglang_reasoncache.eviction.row_state import Decision
from tests.eviction.rows import PAGED, SETUPS, SINGLE, begun, evicted, steps, world_of
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import OUTPUT, PROMPT, Eviction, Pair, Setup, SlowMeter, World
from tests.unit.test_pipeline import arrive, lack, used

#: Number of positions whose KV is written when ``World.start`` returns a request.
WRITTEN = len(PROMPT) + OUTPUT


def evict(world: World, req: Req, *evictions: Eviction) -> int:
    """Makes the scripted policy evict ``evictions`` at a poll; returns how many slots became free."""
    world.evictor.waiting[req.rid] = list(evictions)
    return world.controller.after_decode([req])


@dataclasses.dataclass(frozen=True)
class Failing(StreamingLLM):
    def scores(self, view: View) -> torch.Tensor:
        raise KeyError("oops")


def test_a_policy_that_fails_ends_evicting_and_no_server() -> None:
    world, req = begun(SINGLE, Failing(budget=16, slack=0, recent=1))
    assert world.controller.report.disabled == "KeyError: 'oops'"
    steps(world, req, count=3)
    assert evicted(world, req) == []


@dataclasses.dataclass(frozen=True)
class Careless(StreamingLLM):
    """``fault``: how it breaks the contract. "twice" does no harm."""

    fault: str = ""

    def candidates(self, view: View) -> np.ndarray:
        mine = super().candidates(view)
        others = {"prompt": view.held[:-4], "newest": view.held[::3], "twice": np.repeat(mine, 2)}
        return others.get(self.fault, mine)

    def scores(self, view: View) -> torch.Tensor:
        scores = super().scores(view)
        shapes = {"few": scores[1:], "heads": scores[None]}
        return shapes.get(self.fault, scores)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("prompt", "policy policy0: candidates() needs held positions from 6 to 28, got others"),
        ("newest", "policy policy0: candidates() needs held positions from 6 to 28, got others"),
        ("few", r"a policy's scores need the shape (30,), got (29,)"),
        ("heads", r"a policy's scores need the shape (30,), got (1, 30)"),
        ("twice", None),
    ],
)
def test_a_policy_that_breaks_the_contract_frees_no_slot_of_others(
    fault: str, said: str | None
) -> None:
    world, req = begun(SINGLE, Careless(budget=16, slack=0, recent=1, fault=fault))
    disabled = world.controller.report.disabled
    assert (said or "None") in str(disabled)
    gone = evicted(world, req)
    assert bool(gone) == (said is None) and min(gone, default=8) >= len(PROMPT)
    free = world.free_pages().tolist()
    assert len(free) == len(set(free)) == world.total - WRITTEN + len(gone)
    steps(world, req, count=3)


@dataclasses.dataclass(frozen=True)
class Half(StreamingLLM):
    """Names three positions of four."""

    def candidates(self, view: View) -> np.ndarray:
        mine = super().candidates(view)
        return mine[mine % 4 != 0]


def test_pages_named_in_part_stay() -> None:
    world, req = begun(PAGED, Half(budget=16, slack=0, recent=1))
    steps(world, req, count=12)
    assert world.controller.report.disabled is None and evicted(world, req) == []


@dataclasses.dataclass(frozen=True)
class Second(StreamingLLM):
    """Names positions from 18 to 27."""

    def candidates(self, view: View) -> np.ndarray:
        mine = super().candidates(view)
        return mine[(mine >= 18) & (mine < 28)]


def test_a_position_that_shares_with_one_that_stays_is_not_evicted() -> None:
    world = world_of(SINGLE, Second(budget=WRITTEN + 2, slack=0, recent=1))
    req = world.start()
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    steps(world, req, count=24)
    assert evicted(world, req) == [18, 19, 24, 25, 26, 27]
    stats = world.controller.stats.eviction
    assert stats.positions_evicted == stats.slots_freed_by_eviction


def test_policies_are_described_with_their_options() -> None:
    world = world_of(SINGLE, StreamingLLM(budget=10_000, when="short"))
    [options] = world.controller.describe()["evictors"]
    assert (options["name"], options["budget"], options["when"]) == ("policy0", 10_000, "short")


@SETUPS
def test_a_budget_counts_slots(setup: Setup) -> None:
    """The budget does not count slots that sharing saved. All positions of a slot are evicted, or none."""
    budget = WRITTEN + 6
    world, req = begun(setup, StreamingLLM(budget=budget, slack=1, recent=1))
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    before = []
    for i in range(40):
        steps(world, req, first=i)
        row = world.row(req)
        slots = len(set(row[row >= 0].tolist()))
        assert slots <= budget + 1
        if not evicted(world, req):
            assert slots == len(row) - 4
            before.append(len(row))
        # Both positions of a shared slot stay, or both go.
        assert (row[8:12] == row[20:24]).all()
    assert before[-1] == budget + 4 + 1, "evicted while the slots were within the budget"
    # The evicted positions are one run without gaps, which ends after the shared block.
    gone = evicted(world, req)
    assert gone == list(range(gone[0], gone[-1] + 1)) and gone[-1] > 23
    totals = world.controller.stats
    assert totals.eviction.positions_evicted - totals.eviction.slots_freed_by_eviction == 4
    assert world.controller.pipeline.saved == 0


@SETUPS
def test_a_retracted_row_gives_up_nothing_that_sharing_saved(setup: Setup) -> None:
    """After a retraction, policies wait until the blocks share again, some polls later."""
    policy = RandomAttention(budget=WRITTEN - 2, slack=4, recent=4)
    world = world_of(setup, policy, meter_type=SlowMeter)
    arrive(world, True)
    req = world.start()
    world.propose(req, Pair(24, 8), Pair(20, 12))
    world.controller.after_decode([req])
    steps(world, req, count=8)
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
    # From then on the policy evicts as before.
    steps(world, req, count=20)
    assert len(evicted(world, req)) > len(gone)


@pytest.mark.parametrize("run", [Eviction(21, 1), Eviction(9, 2)], ids=["destination", "source"])
def test_an_eviction_while_its_block_is_being_measured(run: Eviction) -> None:
    """The block is refused: its evicted slots belong to another request, and are neither shared nor freed."""
    world, req = begun(SINGLE, meter_type=SlowMeter)
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 0
    assert evict(world, req, run) == run.length
    # Another request gets the evicted slots.
    other = world.start("other", first=300)
    row = world.row(other).copy()
    arrive(world, True)
    world.controller.after_decode([req, other])
    assert world.controller.stats.refusals["evicted"] == 1
    assert evicted(world, req) == list(range(run.start, sum(run)))
    assert (world.row(other) == row).all()


def test_a_budget_below_the_prompt_is_not_asked_for_each_time() -> None:
    world, req = begun(SINGLE, StreamingLLM(budget=2, slack=8, recent=1))
    steps(world, req, count=16)
    assert world.controller.stats.eviction.eviction_decisions <= 1 + 16 // 8
    assert evicted(world, req)[0] == len(PROMPT)


@pytest.mark.parametrize(("order", "decisions"), [(1, 2), (-1, 1)])
def test_policies_in_sequence(order: int, decisions: int) -> None:
    """The second policy decides on what the first policy left."""
    both = [kind(budget=b, slack=1, recent=1) for kind, b in ((StreamingLLM, 20), (KeyDiff, 16))]
    world, req = begun(SINGLE, *both[::order])
    assert WRITTEN - len(evicted(world, req)) == 16
    assert world.controller.stats.eviction.eviction_decisions == decisions


#: Setups whose pool has fewer slots than the prompt ``LONG`` has tokens.
SMALL = pytest.mark.parametrize(
    "setup", [dataclasses.replace(setup, slots=64) for setup in (SINGLE, PAGED)], ids=str
)
TREES = pytest.mark.parametrize("no_tree", [False, True], ids=["tree", "no-tree"])
LONG = range(1, 101)
BUDGET = 24
CHUNK = 8


@pytest.mark.parametrize("ready", [True, False])
def test_policies_that_decide_together_do_not_evict_below_the_budget(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a decision is carried out at a later poll, when another policy may have evicted already."""
    waits = iter([ready, ready])
    monkeypatch.setattr(Decision, "is_immediate", property(lambda _: next(waits, True)))
    monkeypatch.setattr(Decision, "ready", lambda _: False)
    policies = (
        StreamingLLM(budget=20, slack=0, recent=1),
        RandomAttention(budget=20, slack=0, recent=1),
    )
    world, req = begun(SINGLE, *policies)
    for _ in range(2):
        steps(world, req)
    assert WRITTEN + 2 - len(evicted(world, req)) == 20


def chunks(world: World, req: Req) -> Iterator[None]:
    """Computes the prompt chunk by chunk as the scheduler does; yields between two chunks."""
    while not req.output_ids:
        req.init_next_round_input(None if req.kv.holds_kv else world.tree)
        if req.lock is None:
            req.lock = world.tree.lock(req.last_node)
        total = len(req.full_untruncated_fill_ids)
        begin = req.prefix_len
        req.extend_end = min(req.prefix_len + CHUNK, total)
        slots = world.extend(req)
        world.write(slots, range(begin, req.extend_end))
        if req.extend_end < total:
            # The scheduler begins its next round with this call.
            checkpoint_kv_cache(req, world.tree)
            yield
            continue
        world.allocator.free_group_begin()
        req.output_ids.append(7)
        checkpoint_kv_cache(req, world.tree)
        world.allocator.free_group_end()
        world.controller.after_prefill([req], [total])


def prefilled(world: World) -> Req:
    req = world.request("r", LONG[:32])
    assert len(list(chunks(world, req))) == 3
    return req


def held(world: World, req: Req) -> list[int]:
    """Returns the positions that have a slot; checks that each slot holds the position's own KV."""
    row = world.row(req)
    kept = np.flatnonzero(row >= 0)
    assert (world.contents()[row[kept]] == kept).all()
    return kept.tolist()


@SMALL
@TREES
@pytest.mark.parametrize("kind", [StreamingLLM, KeyDiff])
def test_memory_never_exceeds_budget_and_chunk(setup: Setup, no_tree: bool, kind: type) -> None:
    """A request with a long prompt takes at most budget + chunk slots (as in the KeyDiff paper) and a page."""
    policy = kind(budget=BUDGET, slack=0, recent=1, prompt=True)
    world = world_of(setup, policy, no_tree=no_tree)
    req = world.request("r", LONG)
    before = np.zeros(0)
    for _ in chunks(world, req):
        assert len(held(world, req)) <= BUDGET
        # A position keeps its slot or is evicted; evicted positions stay evicted.
        after = world.row(req)[: len(before)]
        assert ((after == before) | (after == -1)).all()
        before = world.row(req).copy()
    peak = world.total - world.lowest_free
    assert BUDGET < peak <= BUDGET + CHUNK + setup.page
    assert len(held(world, req)) <= BUDGET
    for i in range(20):
        steps(world, req, first=100 + i)
        assert used(world) <= BUDGET + 2 * setup.page


@SMALL
@TREES
def test_the_prompt_stays_where_no_policy_asks_for_it(setup: Setup, no_tree: bool) -> None:
    """The prompt stays, even without a prefix tree, and even if a policy asks to evict a part of it."""
    policy = StreamingLLM(budget=8, slack=0, recent=1)
    world = world_of(setup, policy, no_tree=no_tree)
    req = prefilled(world)
    steps(world, req, count=16, first=32)
    assert held(world, req)[:32] == list(range(32))
    assert len(held(world, req)) <= 32 + 2 * setup.page

    world = World(setup, no_tree=True)
    req = prefilled(world)
    world.controller.after_decode([req])
    world.evictor.waiting["r"] = [Eviction(8, 8)]
    world.step(req, 32)
    assert world.controller.after_decode([req]) == 0


# -- policies with ``when=short``, which evict when SGLang lacks slots -----------------------

KEYDIFF = KeyDiff(budget=16, slack=0, recent=1, when="short")
OLDEST = StreamingLLM(budget=16, slack=0, recent=1, when="short")


def grown(world: World, name: str, length: int) -> Req:
    req = world.request(name, PROMPT)
    world.respond(req, [ord(name), *(50 + i % 40 for i in range(length))])
    return req


def several(
    setup: Setup, policy: Evictor, *lengths: int, **options: Any
) -> tuple[World, list[Req]]:
    """A world and requests after a poll. ``lengths``: how many response tokens of each request have KV."""
    world = world_of(setup, policy, **options)
    reqs = [grown(world, name, length) for name, length in zip("abc", lengths, strict=False)]
    world.controller.after_decode(reqs)
    return world, reqs


@SETUPS
def test_the_longest_gives_what_is_missing(setup: Setup) -> None:
    """A policy evicts only in a shortage: from the longest request, down to the budget, then from others."""
    world, (short, long) = several(setup, OLDEST, 40, 80)
    for i in range(8):
        world.step(long, i)
        world.controller.after_decode([short, long])
    assert world.controller.stats.eviction.positions_evicted == lack(world, 0) == 0
    assert lack(world, 10) == -(-10 // setup.page) * setup.page
    assert evicted(world, short) == [] and len(evicted(world, long)) >= 10
    length = len(world.row(long))
    # ``length`` slots are more than the longest request can free, so the other request frees slots too.
    assert lack(world, length) >= length - 16
    assert length - len(evicted(world, long)) <= 16 + setup.page
    assert evicted(world, short) != []
    # After this call no request can free more.
    lack(world, 1000)
    assert lack(world, 1000) == 0
    for req in (short, long):
        assert len(world.row(req)) - len(evicted(world, req)) <= 16 + setup.page
        world.step(req)


def test_more_goes_than_is_missing_where_the_slack_is_more() -> None:
    """A policy evicts ``slack`` positions at once, because the next decode step would be short again."""
    world, _ = several(SINGLE, dataclasses.replace(OLDEST, slack=12), 60)
    assert lack(world, 1) == 12


@pytest.mark.parametrize("policy", [OLDEST, KEYDIFF], ids=["oldest", "keydiff"])
def test_no_request_is_retracted_while_another_one_has_to_give(policy: Evictor) -> None:
    """Two responses grow until the pool could not hold both without evictions."""
    world, reqs = several(SINGLE, policy, 60, 70)
    steps(world, *reqs, count=60)
    assert used(world) <= world.total < sum(len(world.row(req)) for req in reqs)
    assert world.controller.stats.shortages > 0


@pytest.mark.parametrize("budget", [2, 30], ids=["below the prompt", "above it"])
def test_a_lasting_shortage_scores_a_row_once_for_slack_positions(budget: int) -> None:
    """At every step SGLang is short of more slots than all requests can free."""
    slack = 8
    world, reqs = several(SINGLE, dataclasses.replace(KEYDIFF, budget=budget, slack=slack), 60, 70)
    for i in range(40):
        for req in reqs:
            world.step(req, i)
        lack(world, 1000)
        for req in reqs:
            held = len(world.row(req)) - len(evicted(world, req))
            assert held <= max(budget, len(PROMPT) + 1) + slack
    assert 0 < world.controller.stats.eviction.eviction_decisions <= len(reqs) * (1 + 40 // slack)


def test_sharing_comes_first() -> None:
    """Accepted blocks wait for a shortage, and share before positions are evicted: sharing loses less KV."""
    setup = dataclasses.replace(SINGLE, when="short")
    world, (req,) = several(setup, OLDEST, 60)
    world.propose(req, Pair(40, 20), Pair(48, 28))
    world.controller.after_decode([req])
    assert lack(world, 6) == 8
    assert evicted(world, req) == [] and world.controller.pipeline.saved == 8
    assert lack(world, 5) == 5 and len(evicted(world, req)) >= 5


def test_who_left_or_opted_out_is_not_asked() -> None:
    world, (gone, req) = several(SINGLE, OLDEST, 60, 20)
    world.finish(gone)
    whole = world.request("whole", PROMPT, True)
    world.respond(whole, [7, *range(50)])
    world.controller.after_decode([req, whole])
    # SGLang first evicts what the finished request left in the tree.
    lack(world, 1000)
    assert world.tree.evictable_size() == 0
    assert evicted(world, whole) == [] and len(evicted(world, req)) > 0
