# SPDX-License-Identifier: Apache-2.0
"""Tests MemShare's pairing (``align=nearest``): of the pairs of two steps' blocks those with the least KV
distance share, and no block is in two of them."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req

from sglang_reasoncache.sharing.nearest import nearest_pairs
from sglang_reasoncache.sharing.request import known_record
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.eviction.rows import steps
from tests.property.world import Pair, Setup, SlowMeter, World

SETUP = Setup(page=1, block=4, slots=120)
#: Two steps of three blocks each.
READERS = (18, 22, 26)
SOURCES = (6, 10, 14)
ALL = [Pair(*both) for both in itertools.product(READERS, SOURCES)]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(6, 11)), max_size=36, unique=True),
    st.data(),
)
def test_no_block_twice_and_none_left_out_that_is_nearer(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    distance = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf, math.nan])
    distances = data.draw(st.lists(distance, min_size=len(pairs), max_size=len(pairs)))
    chosen = nearest_pairs(pairs, distances)
    assert chosen == sorted(set(chosen))
    blocks = [block for i in chosen for block in pairs[i]]
    assert len(set(blocks)) == len(blocks)
    # A pair that was left out has a block in a chosen pair that is at most as far.
    far = [math.inf if math.isnan(distance) else distance for distance in distances]
    for i in set(range(len(pairs))) - set(chosen):
        assert any(set(pairs[i]) & set(pairs[j]) and far[j] <= far[i] for j in chosen)


def world_of(when: str = "always") -> World:
    world = World(dataclasses.replace(SETUP, when=when))
    world.engine.nearest = True
    return world


def place(world: World, req: Req, contents: dict[int, float]) -> None:
    """Set all K and V of the block that begins at each position."""
    for start, content in contents.items():
        slots = torch.from_numpy(world.row(req)[start : start + 4].copy()).long()
        for buffer in (*world.pool.k_buffer, *world.pool.v_buffer):
            buffer[slots] = content


def blocks_of(req: Req) -> set[tuple[int, int]]:
    return {(block.dst_start, block.runs[0].src_start) for block in known_record(req).redirected}


#: Block 22 is nearest to 14, then 18 to 10. What is left for 26 is 6, however far.
CONTENTS = {18: 5.0, 22: 9.0, 26: 9.5, 6: -50.0, 10: 4.0, 14: 9.1}
CHOSEN = {(18, 10), (22, 14), (26, 6)}


def test_the_nearest_blocks_share() -> None:
    world = world_of()
    req = world.start()
    place(world, req, CONTENTS)
    world.propose(req, *ALL)
    assert world.controller.after_decode([req]) == 12
    assert blocks_of(req) == CHOSEN
    assert world.controller.stats.blocks_compared == len(CHOSEN)
    row = world.row(req).tolist()
    assert all(row[dst : dst + 4] == row[src : src + 4] for dst, src in CHOSEN)
    # A block that shares is no alternative any more, and the pairs without it are chosen among.
    for _ in range(4):
        world.step(req)
    world.propose(req, Pair(18, 2), Pair(30, 2))
    assert world.controller.after_decode([req]) == 4
    assert blocks_of(req) == CHOSEN | {(30, 2)}
    assert world.controller.stats.refusals == {"overlap": 1}


def test_with_room_only_the_chosen_wait_in_the_ledger() -> None:
    """``when=short``: alternatives are measured at once, the chosen share when SGLang is short of slots."""
    world = world_of("short")
    req = world.start()
    place(world, req, CONTENTS)
    world.propose(req, *ALL)
    steps(world, req)
    assert not blocks_of(req) and world.controller.pipeline.ledger.slots == 12
    assert world.controller.pipeline.reclaim(12) == 12
    assert blocks_of(req) == CHOSEN


@pytest.mark.parametrize("arrived", [False, True])
def test_alternatives_of_a_retracted_request(arrived: bool) -> None:
    """What was chosen before a retraction shares again; what was being measured then is forgotten."""
    world = World(SETUP, SlowMeter)
    world.engine.nearest = True
    assert isinstance(world.meter, SlowMeter)
    req = world.start()
    world.propose(req, *ALL)
    world.meter.arrived = arrived
    assert world.controller.after_decode([req]) == (12 if arrived else 0)
    before = blocks_of(req)
    world.retract(req)
    world.come_back(req)
    world.meter.arrived = True
    for _ in range(2):
        world.controller.after_decode([req])
    assert blocks_of(req) == before
    assert world.controller.stats.refusals == ({} if arrived else {"late": len(ALL)})
    assert world.controller.stats.blocks_reapplied == (3 if arrived else 0)
