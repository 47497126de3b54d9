# SPDX-License-Identifier: Apache-2.0
"""Proposals on their way: nothing waits for them, and what comes too late is refused. SGLang's
pools, requests and release path with our controller; only the moment when results arrive is the
test's to choose, as a GPU's would be."""

import gc
import threading
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import Pair, Setup, SlowMeter, World

SETUP = Setup(page=1, block=4, slots=120, publish="exact")


@pytest.fixture
def slow() -> World:
    return World(SETUP, SlowMeter)


def arrive(world: World, yes: bool) -> None:
    """What is in flight, now or later, has arrived or not."""
    assert isinstance(world.meter, SlowMeter)
    world.meter.arrived = yes


def state(world: World, req: Req) -> Any:
    return world.controller.state_of(req)


def pairs_of(world: World, req: Req) -> list[tuple[int, int]]:
    """Blocks that share."""
    return [(block.dst_start, block.src_start) for block in state(world, req).redirected]


def used(world: World) -> int:
    return world.total - world.allocator.available_size()


def test_a_batch_in_flight_holds_nobody_up(slow: World) -> None:
    req = slow.start()
    before = used(slow)
    slow.propose(req, Pair(20, 8))
    assert slow.controller.after_decode([req]) == 0
    # Later results stay with the engine, so rows do not change under the measurement.
    slow.propose(req, Pair(26, 14))
    assert slow.engine.outstanding == 1
    assert used(slow) == before + 2
    arrive(slow, True)
    assert slow.controller.after_decode([req]) == 8
    assert slow.engine.outstanding == 0
    row = slow.row(req).tolist()
    assert row[20:24] == row[8:12] and row[26:30] == row[14:18]


def assert_judged(world: World, freed: int, refusal: str) -> None:
    """A block of four was refused, or freed its slots."""
    seen = freed, dict(world.controller.stats.refusals)
    assert seen == ((0, {refusal: 1}) if refusal else (4, {}))


@pytest.mark.parametrize(
    ("pair", "min_age", "refusal"),
    [
        (Pair(20, 8), 0, ""),
        (Pair(8, 20), 0, ""),
        (Pair(8, 20), 1000, "too_young"),
        (Pair(22, 8), 0, "part_of_page"),
        (Pair(20, 9), 0, "part_of_page"),
        (Pair(20, 20), 0, "overlap"),
    ],
)
def test_blocks_that_no_distance_can_help(pair: Pair, min_age: int, refusal: str) -> None:
    """Whole pages, one not in the other, and no reader that the model just wrote."""
    world = World(Setup(page=4, block=4, slots=160, publish="exact"))
    world.controller.pipeline._min_age = min_age
    req = world.start()
    before = world.row(req).copy()
    world.propose(req, pair)
    freed = world.controller.after_decode([req])
    assert_judged(world, freed, refusal)
    assert (world.row(req)[: len(before)] != before).sum() == freed


def test_a_retracted_request_shares_again(slow: World) -> None:
    """Decisions stand over a retraction; blocks of a batch of the old row are measured in the new."""
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
    # The old batch arrives and finds its row gone.
    assert [slow.controller.after_decode([req]) for _ in range(2)] == [0, 8]
    stats = slow.controller.stats
    assert stats.refusals["late"] == stats.blocks_reapplied == 1 and stats.blocks_shared == 2
    row = slow.row(req).tolist()
    assert row[20:24] == row[8:12] and row[26:30] == row[14:18]


def test_results_of_a_request_that_disappeared_are_refused(everything_comes_back: list) -> None:
    """Aborted while it waited to be scheduled again, it is never released."""
    world = World(SETUP)
    req = world.start()
    followed = state(world, req).followed.id
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


class Voting(Ranks):
    """The slowest other rank has ``allowed``; None: the others have what we have."""

    def __init__(self, allowed: int | None) -> None:
        super().__init__()
        self.allowed = allowed
        self.asked: list[int] = []

    def least(self, value: int) -> int:
        self.asked.append(int(value))
        return value if self.allowed is None else min(value, self.allowed)


def test_ranks_take_only_what_all_of_them_have() -> None:
    """Under tensor parallelism the slowest rank's filter decides, then its device."""
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
    ranks.asked, ranks.allowed = [], 0
    assert world.controller.after_decode([req]) == 0
    assert ranks.asked == [1]
    ranks.allowed = None
    assert world.controller.after_decode([req]) == 4


@pytest.mark.parametrize("where", ["here", "on another rank"])
@pytest.mark.parametrize("given_up", [False, True])
def test_a_failed_engine_is_left_by_all_requests(where: str, given_up: bool) -> None:
    """What it knew is lost; shared blocks stay, and new requests are followed unless it was
    given up."""
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
    engine, stats, left = world.engine, world.controller.stats, state(world, req)
    assert (engine.restarts, engine.outstanding) == (1, 0)
    assert (stats.filter_restarts, stats.filter_given_up) == (1, int(given_up))
    assert left.followed is None and pairs_of(world, req) == [(20, 8)]
    assert world.controller.pipeline.saved == 4
    other = world.start("other", first=200)
    assert (state(world, other).followed is None) == given_up
    world.step(req)
    assert world.controller.after_decode([req, other]) == 0
    assert world.engine.closed == set()


def test_polls_the_requests_now_and_then() -> None:
    """One that ended before the first poll is counted too."""
    world = World(SETUP, interval=4)
    req = world.start()  # one call
    world.finish(world.start("short"))  # another one
    stats = world.controller.stats
    assert (stats.requests_seen, stats.requests_finished) == (1, 1)
    world.step(req)
    world.controller.after_decode([req])
    assert state(world, req) is None
    world.step(req)
    world.controller.after_decode([req])
    assert state(world, req).fed == len(req.output_ids) - 1
    assert (stats.decode_steps, stats.polls, stats.requests_seen) == (4, 1, 2)


def test_ratios_of_the_endpoint() -> None:
    names = ("finished_redirected", "finished_positions", "finished_evicted")
    for finished, affected, final in (
        # One counts tokens, the other one requests.
        ([(50, 100, 0), (0, 900, 0)], 0.05, 0.25),
        # Evicted positions are saved too.
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
