# SPDX-License-Identifier: Apache-2.0
"""Tests that decode steps go on while KV distances of blocks are measured, and that results which arrive too
late are refused. The tests run SGLang's pools, requests and ``release_kv_cache`` with our controller. They need
no GPU, because each test sets when distances arrive."""

import dataclasses
import gc
import threading
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, Req, release_req
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_reasoncache import compat
from sglang_reasoncache.cache.owner import NOTHING_PROMISED
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.plugin import hooks
from sglang_reasoncache.sharing.request import known_record, record_of
from sglang_reasoncache.sharing.rules import Rules
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.eviction.rows import steps
from tests.property.world import PROMPT, Pair, Setup, SlowMeter, World

SETUP = Setup(page=1, block=4, slots=120)


@pytest.fixture
def slow() -> World:
    return World(SETUP, SlowMeter)


def arrive(world: World, yes: bool) -> None:
    """Sets whether measurements count as arrived: those in flight now, and all later ones."""
    assert isinstance(world.meter, SlowMeter)
    world.meter.arrived = yes


#: ``record_of`` with type ``Any``, so that tests need not check for None.
state: Any = record_of


def pairs_of(req: Req) -> list[tuple[int, int]]:
    """The request's blocks that share: the first position of each, and of its source."""
    return [run[:2] for block in state(req).redirected for run in block.runs]


def used(world: World) -> int:
    return world.total - world.allocator.available_size()


def test_a_batch_in_flight_holds_nobody_up(slow: World) -> None:
    req = slow.start()
    before = used(slow)
    slow.propose(req, Pair(20, 8))
    assert slow.controller.after_decode([req]) == 0
    # While a batch is measured, later block pairs stay in the engine, which stands in for the filter.
    slow.propose(req, Pair(26, 14))
    assert slow.engine.outstanding == 1
    assert used(slow) == before + 2
    arrive(slow, True)
    assert slow.controller.after_decode([req]) == 8
    assert slow.engine.outstanding == 0
    row = slow.row(req).tolist()
    assert row[20:24] == row[8:12] and row[26:30] == row[14:18]


def assert_judged(world: World, freed: int, refusal: str) -> None:
    """Checks that a block of four tokens was refused for ``refusal``, or freed four slots if that is empty."""
    seen = freed, dict(world.controller.stats.refusals)
    assert seen == ((0, {refusal: 1}) if refusal else (4, {}))


@pytest.mark.parametrize(
    ("pair", "min_age", "refusal"),
    [
        (Pair(20, 8), 0, ""), (Pair(8, 20), 0, ""), (Pair(8, 20), 1000, "too_young"),
        (Pair(20, 9), 0, ""), (Pair(20, 20), 0, "same_slots"), (Pair(20, 23), 0, ""),
    ],
)  # fmt: skip
def test_blocks_that_no_distance_can_help(pair: Pair, min_age: int, refusal: str) -> None:
    """A page is refused if it is its own source, or fewer than ``min_age`` tokens follow. Its source may begin
    anywhere, in the page, too."""
    world = World(Setup(page=4, block=4, slots=160), min_age=min_age)
    req = world.start()
    before = world.row(req).copy()
    world.propose(req, pair)
    freed = world.controller.after_decode([req])
    assert_judged(world, freed, refusal)
    assert (world.row(req)[: len(before)] != before).sum() == freed


def test_a_flush_forgets_what_was_judged() -> None:
    """After a cache flush blocks are judged again, because a retracted request may go on with new weights."""
    world = World(Setup(1, 4, 120, when="always"))
    req = world.start()
    pipeline = world.controller.pipeline
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    world.step(req)
    world.retract(req)
    world.assert_empty()
    world.rows.clear()
    assert pipeline.threshold.num_observed == world.controller.stats.blocks_compared == 0
    world.come_back(req)
    while not pipeline.saved:
        world.controller.after_decode([req])
    assert pipeline.threshold.num_observed == world.controller.stats.blocks_compared == 1


def test_a_retracted_request_shares_again(slow: World) -> None:
    """Accepted blocks share again after a retraction. Blocks that were being measured are measured again."""
    arrive(slow, True)
    req = slow.start()
    slow.propose(req, Pair(20, 8))
    assert slow.controller.after_decode([req]) == 4
    arrive(slow, False)
    slow.propose(req, Pair(26, 14))
    slow.controller.after_decode([req])
    slow.retract(req)
    assert slow.controller.pipeline.saved == 0
    slow.come_back(req)
    arrive(slow, True)
    # The first poll refuses the batch measured before the retraction, whose block table is gone.
    assert [slow.controller.after_decode([req]) for _ in range(2)] == [0, 8]
    stats = slow.controller.stats
    assert stats.refusals["late"] == stats.blocks_reapplied == 1 and stats.blocks_shared == 2
    row = slow.row(req).tolist()
    assert row[20:24] == row[8:12] and row[26:30] == row[14:18]


def test_results_of_a_request_that_disappeared_are_refused(everything_comes_back: list) -> None:
    """SGLang does not tell us when a waiting retracted request is aborted. Python only garbage-collects it."""
    world = World(SETUP)
    req = world.start()
    followed = state(req).followed.id
    world.engine.waiting[followed] += (Pair(20, 8),)
    world.engine.feed([followed], [1], [7])  # type: ignore[arg-type]
    world.retract(req)
    collector = threading.Thread(target=lambda held: held.clear(), args=([req],))
    del req
    everything_comes_back.clear()
    collector.start()
    collector.join()
    gc.collect()
    assert followed not in world.engine.closed, "closed by the scheduler's thread only"
    other = world.start("other")
    assert followed in world.engine.closed
    world.controller.after_decode([other])
    assert world.controller.stats.refusals["late"] == 1


def test_a_block_that_waits_is_refused_once(slow: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block comes into a window while it is measured, and is asked about at each poll until it has left."""
    end = 1000
    monkeypatch.setattr(compat, "freed_of_window", lambda kv, page: (0, end))
    slow.controller.pipeline._rules = Rules(has_window_pool=True)
    req = slow.start()
    slow.propose(req, Pair(20, 8))
    slow.controller.after_decode([req])
    end = 0
    arrive(slow, True)
    for _ in range(4):
        assert slow.controller.after_decode([req]) == 0
    assert slow.controller.stats.refusals == state(req).refusals == {"in_window": 1}
    end = 1000
    slow.controller.after_decode([req])
    assert slow.controller.pipeline.ledger.slots == 4 or slow.controller.pipeline.saved == 4


class Voting(Ranks):
    """Acts as if the slowest other rank had ``allowed`` results, or as many as this rank if that is None."""

    def __init__(self, allowed: int | None) -> None:
        super().__init__()
        self.allowed = allowed
        self.asked: list[int] = []

    def least(self, value: int) -> int:
        self.asked.append(int(value))
        return value if self.allowed is None else min(value, self.allowed)


def test_ranks_take_only_what_all_of_them_have() -> None:
    """A rank takes only filter results that all ranks have, and judges only distances that all ranks have."""
    ranks = Voting(0)
    world = World(SETUP, SlowMeter, ranks=ranks)
    req = world.start()
    assert ranks.asked == [], "nothing handed over, nothing to agree on"
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 0
    assert world.controller.after_decode([req]) == 0
    assert ranks.asked == [1, 1] and world.engine.outstanding == 1
    ranks.allowed = 1
    assert world.controller.after_decode([req]) == 0
    assert world.engine.outstanding == 0
    arrive(world, True)
    ranks.asked = []
    ranks.allowed = 0
    assert world.controller.after_decode([req]) == 0
    assert ranks.asked == [1]
    ranks.allowed = None
    assert world.controller.after_decode([req]) == 4


@pytest.mark.parametrize("where", ["here", "on another rank"])
@pytest.mark.parametrize("given_up", [False, True])
def test_a_failed_engine_is_left_by_all_requests(where: str, given_up: bool) -> None:
    """After the engine (the filter) failed, it does not follow the running request any more. The request's
    shared blocks stay shared. The engine follows new requests unless it was given up."""
    ranks = Voting(None)
    world = World(SETUP, ranks=ranks)
    req = world.start()
    world.propose(req, Pair(20, 8))
    assert world.controller.after_decode([req]) == 4
    world.propose(req, Pair(26, 14))
    world.engine.given_up = given_up
    if where == "here":
        world.engine.broken = True
    else:
        ranks.allowed = -1
    assert world.controller.after_decode([req]) == 0
    ranks.allowed = None
    engine = world.engine
    stats = world.controller.stats
    left = state(req)
    assert (engine.restarts, engine.outstanding) == (1, 0)
    assert (stats.filter_restarts, stats.filter_given_up) == (1, int(given_up))
    assert left.followed is None and pairs_of(req) == [(20, 8)]
    assert world.controller.pipeline.saved == 4
    other = world.start("other", first=200)
    assert (state(other).followed is None) == given_up
    world.step(req)
    assert world.controller.after_decode([req, other]) == 0
    assert world.engine.closed == set()


def test_polls_the_requests_now_and_then() -> None:
    """A request that ended before the first poll is counted too."""
    world = World(SETUP, interval=4)
    req = world.start()  # the first decode step
    world.finish(world.start("short"))  # the second
    stats = world.controller.stats
    assert (stats.requests_seen, stats.requests_finished) == (1, 1)
    world.step(req)
    world.controller.after_decode([req])
    assert state(req) is None
    world.step(req)
    world.controller.after_decode([req])
    assert state(req).fed == len(req.output_ids) - 1
    assert (stats.decode_steps, stats.polls, stats.requests_seen) == (4, 1, 2)


def test_ratios_of_the_endpoint() -> None:
    names = ("finished_redirected", "finished_positions", "finished_evicted")
    for finished, affected, final in (
        # ``affected_ratio`` divides by all tokens, ``final_saving_ratio`` is the mean of each request's ratio.
        ([(50, 100, 0), (0, 900, 0)], 0.05, 0.25),
        # Evicted positions count as saved.
        ([(10, 100, 30)], 0.4, 0.4),
        ([], 0.0, 0.0),
    ):
        stats = SharingStats()
        for redirected, positions, evicted in finished:
            stats.request_finished(redirected, positions, evicted=evicted)
        seen = stats.to_dict()
        assert [seen[name] for name in names] == [sum(one[i] for one in finished) for i in range(3)]
        assert seen["affected_ratio"] == pytest.approx(affected)
        assert seen["final_saving_ratio"] == pytest.approx(final)
        assert "sum_saved" not in seen


# -- accepted blocks share when SGLang is short of slots --------------------------------------

SETUPS = [
    Setup(page=1, block=4, slots=120, when="short"),
    Setup(page=4, block=4, slots=160, when="short"),
]
ALL_SETUPS = pytest.mark.parametrize("setup", SETUPS, ids=str)


def find(world: World, req: Req, *pairs: Pair) -> None:
    """Has the engine (the filter) propose ``pairs``, then runs a decode step whose poll takes them."""
    world.propose(req, *pairs)
    steps(world, req)


def lack(world: World, slots: int) -> int:
    """Asks for ``slots`` more slots than are free, as decode steps do. Returns how many slots became free."""
    before = world.allocator.available_size()
    fits = world.allocator.check_decode_capacity(num_tokens=before + slots, tree_cache=world.tree)
    found: int = world.allocator.available_size() - before
    assert fits == (found >= slots)
    return found


def ledger(world: World) -> Any:
    return world.controller.pipeline.ledger


@ALL_SETUPS
@pytest.mark.parametrize("no_tree", [False, True])
def test_the_nearest_blocks_share_first_and_only_when_slots_are_short(
    setup: Setup, no_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tested with and without a prefix cache; without one SGLang has nothing to evict."""
    monkeypatch.setattr("sglang_reasoncache.sharing.pipeline._LEAST_RECLAIMED", 1)
    world = World(setup, no_tree=no_tree)
    req = world.start()
    before = world.row(req).copy()
    # KV values grow with the position, so the KV distance is small between near positions.
    find(world, req, Pair(8, 28), Pair(16, 20), Pair(12, 24))
    assert ledger(world).slots == 12 and len(ledger(world)) == 3
    assert (world.row(req)[: len(before)] == before).all() and lack(world, 0) == 0
    assert [lack(world, 3), lack(world, 5), lack(world, 9)] == [4, 8, 0]
    assert pairs_of(req) == [(16, 20), (12, 24), (8, 28)]
    assert ledger(world).slots == world.controller.stats.blocks_missed == 0


def test_a_pause_has_nobody_share() -> None:
    """SGLang asks for the slots of many steps whenever it releases a retracted request."""
    world = World(Setup(page=1, block=4, slots=60, when="short"))
    reqs = [world.start(rid, first=first) for rid, first in (("a", 100), ("b", 300))]
    for req in reqs:
        find(world, req, Pair(8, 24), Pair(12, 20))
    assert ledger(world).slots == 16 and world.allocator.available_size() < 20
    with world.allocator.releasing():
        release_req(
            req=reqs[0],
            remaing_req_count=1,
            req_to_token_pool=world.rows,
            token_to_kv_pool_allocator=world.allocator,
            tree_cache=world.tree,
            hisparse_coordinator=None,
        )
    assert world.controller.stats.shortages == world.controller.stats.blocks_shared == 0
    assert ledger(world).slots == 8 and lack(world, 1) == 8


def test_blocks_wait_unmeasured_while_the_pool_is_empty() -> None:
    """Blocks are measured only while over half of the pool is in use, or after a request waited for slots."""
    world = World(SETUPS[0])
    pipeline = world.controller.pipeline
    use = [0.4]
    pipeline._use = lambda: use[0]
    req = world.start()
    find(world, req, Pair(8, 24))
    stats = world.controller.stats
    state = record_of(req)
    assert state is not None and len(state.pending) == 1 and stats.blocks_compared == 0
    assert world.controller.promise().shareable == 0
    world.retract(req)
    world.come_back(req)
    world.controller.after_decode([req])
    assert len(state.pending) == 1 and state.row is not None
    assert not world.admits(500)
    for _ in range(2):
        world.controller.after_decode([req])
    assert stats.blocks_compared == 1 and ledger(world).slots == 4 and not state.pending
    pipeline._polls_to_measure = 0
    use[0] = 0.6
    find(world, req, Pair(12, 20))
    assert ledger(world).slots == 8


def test_pending_blocks_are_queued_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """When half of the pool comes into use, no poll queues the blocks of all requests."""
    monkeypatch.setattr("sglang_reasoncache.sharing.pipeline._MOST_QUEUED", 1)
    world = World(Setup(page=1, block=4, slots=400, when="short"))
    pipeline = world.controller.pipeline
    pipeline._use = lambda: 0.4
    reqs = [world.start(f"r{at}", first=100 * at + 100) for at in range(3)]
    for req in reqs:
        find(world, req, Pair(8, 24))
    pipeline._measures = True
    for req in reqs:
        record = record_of(req)
        assert record is not None and len(record.pending) == 1
        pipeline.requeue(req, record)
    left = [record_of(req).pending for req in reqs]  # type: ignore[union-attr]
    assert [len(blocks) for blocks in left] == [0, 1, 1]
    pipeline._use = lambda: 0.6
    for _ in range(8):
        world.controller.after_decode(reqs)
    assert ledger(world).slots == 12


def reserve_as_sglang(world: World) -> None:
    """Admission reserves as many slots for future output as SGLang does."""
    controller = world.controller
    controller.config = dataclasses.replace(controller.config, admission_credit=0.0)


@ALL_SETUPS
def test_a_prompt_that_is_admitted_finds_its_slots(setup: Setup) -> None:
    """If a prompt lacks slots, blocks share before its admission. For its output, blocks may share later."""
    world = World(setup)
    req = world.start()
    find(world, req, Pair(8, 24), Pair(12, 28))
    reserve_as_sglang(world)
    free = world.allocator.available_size()
    row = world.row(req).copy()
    assert world.admits(4, free) and not world.admits(4, free + 8)
    assert (world.row(req) == row).all(), "nobody needs a slot yet"
    assert world.admits(free + 4)
    assert world.allocator.available_size() == free + 8 and ledger(world).slots == 0


@pytest.mark.parametrize(
    ("values", "at_once"),
    [({}, False), ({"when": "always"}, True), ({"policy": "reasoncache+keydiff:budget=64"}, True),
     ({"policy": "reasoncache+keydiff:budget=9:when=short"}, False), ({"preset": "memshare"}, True),
     ({"preset": "memshare", "when": "short"}, False)],
)  # fmt: skip
def test_when_blocks_share(values: dict[str, Any], at_once: bool) -> None:
    assert ReasonCacheConfig.from_mapping(values).shares_at_once == at_once


def test_blocks_share_ahead_of_need_while_a_request_waits() -> None:
    """In a shortage polls keep room for the next decode steps. The work is done before a step needs it."""
    world = World(next(setup for setup in SETUPS if setup.when == "short"))
    controller = world.controller
    there = [10**6]
    controller.room = lambda: there[0]
    req = world.start()
    find(world, req, Pair(8, 24))
    assert ledger(world).slots == 4, "with room, blocks wait"
    there[0] = 0
    controller.after_decode([req])
    assert ledger(world).slots == 4, "nobody waits for slots"
    controller.request_waits(again=False)
    controller.after_decode([req])
    assert ledger(world).slots == 0 and controller.pipeline.saved == 4
    assert controller.stats.shortages == 0


def test_retractions_raise_the_reserve_and_output_lowers_it() -> None:
    world = World(SETUPS[0])
    controller = world.controller
    start = world.controller.shortage.headroom.ahead
    req = world.start()
    controller.after_decode([req])
    assert controller.promise().ahead == start, "nobody waits, so nothing is learned"
    controller.request_waits(again=False)
    controller.after_decode([req])
    lowered = controller.promise().ahead
    assert lowered < start
    world.retract(req)
    assert controller.promise().ahead == lowered, "for a pause, or for another request's priority"
    hooks._after_retracted(controller, ([req], 0.5, []), None)  # type: ignore[arg-type]
    raised = controller.promise().ahead
    assert raised > lowered
    controller.flushed()
    assert controller.promise().ahead == raised, "trainers flush at each step"


@pytest.mark.parametrize("aborted", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_while_beams_run_admission_is_sglangs(shares: bool, aborted: bool) -> None:
    """SGLang ends beams that find no slots. Also between two chunks of a beam's prompt, while others decode."""
    world = World(SETUPS[0])
    controller = world.controller
    controller._is_active = shares
    other = world.start()
    beam = world.request("beam", PROMPT)
    world.respond(beam, range(100, 104))
    beam.beam_group = object()
    controller.before_prefill([beam], torch.zeros(1, dtype=torch.int64))
    for _ in range(3):
        controller.after_decode([other])
        assert controller.promise() is NOTHING_PROMISED
    if aborted:
        # SGLang frees it, and never says that it is finished.
        beam.to_finish = FINISH_ABORT("no slots")
        release_kv_cache(beam, world.tree, checkpoint=False)
    else:
        beam.finished_reason = FINISH_LENGTH(4)
    assert controller.promise() is not NOTHING_PROMISED


def test_what_sglang_ends_instead_of_retracting_leaves_the_filter() -> None:
    """Somebody may keep the request, such as a session, so that it is not garbage-collected."""
    world = World(SETUPS[0])
    req = world.start()
    record = known_record(req)
    assert record.followed is not None
    world.retract(req)
    assert record.followed.id not in world.engine.closed
    hooks._after_retracted(world.controller, ([], 0.5, [req]), None)  # type: ignore[arg-type]
    assert record.followed.id in world.engine.closed
