# SPDX-License-Identifier: Apache-2.0
"""Whether a batch reads moved slots, as the host knows it, against what rows and homes say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

from sglang_reasoncache.cache.moved import MovedMark
from sglang_reasoncache.sharing.decision import Drop
from tests.property.world import MAX_CONTEXT, Pair, Setup, World

pytestmark = pytest.mark.usefixtures("published_config")

PROMPT = list(range(1, 9))
TOKENS = 5


class Homes:
    """A world that also notes where every slot was written."""

    def __init__(self, setup: Setup) -> None:
        self.world = World(setup)
        self.at = np.zeros(setup.slots + setup.page, dtype=np.int64)

    def start(self, prompt: Sequence[int], name: str = "r") -> Req:
        req = self.world.request(name, prompt, False, None)
        self.prefill(req)
        return req

    def prefill(self, req: Req, up_to: int | None = None) -> None:
        world = self.world
        req.init_next_round_input(world.tree)
        req.extend_end = up_to or len(req.full_untruncated_fill_ids)
        req.lock = world.tree.lock(req.last_node)
        begin = req.prefix_len
        self.at[world.extend(req)] = np.arange(begin, req.extend_end)
        checkpoint_kv_cache(req, world.tree)

    def decode(self, req: Req, token: int) -> None:
        world = self.world
        if not req.output_ids:
            req.output_ids.append(token)
        slots = world.decode([req])
        self.at[slots] = req.kv.kv_allocated_len - 1
        req.output_ids.append(token)

    def share(self, req: Req, dst: int, src: int) -> None:
        """The next tokens complete a step whose block is redirected."""
        controller = self.world.controller
        controller.after_decode([req])
        state = controller.state_of(req)
        assert state is not None and state.followed is not None
        self.world.engine.waiting[state.followed.id].append(Pair(dst, src))
        self.decode(req, TOKENS)
        controller.after_decode([req])
        self.decode(req, TOKENS)
        controller.after_decode([req])

    def finish(self, req: Req) -> None:
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.world.tree, checkpoint=True)

    def retract(self, req: Req) -> None:
        release_kv_cache(req, self.world.tree, checkpoint=False)
        req.reset_for_retract()

    def reads_moved(self, req: Req) -> bool:
        """What the rows and homes say."""
        row = self.world.row(req)
        return bool((self.at[row] != np.arange(len(row))).any())


def grow(homes: Homes, req: Req, count: int, first: int = 10) -> None:
    for i in range(count):
        homes.decode(req, first + i)


@pytest.fixture(params=["exact", "aliased"])
def homes(request: pytest.FixtureRequest) -> Homes:
    return Homes(Setup(page=1, block=4, slots=400, publish=request.param))


def test_only_the_request_whose_block_was_redirected(homes: Homes) -> None:
    one, other = homes.start(PROMPT, "one"), homes.start(PROMPT, "other")
    for req in (one, other):
        grow(homes, req, 16)
    tree = homes.world.tree
    assert not tree.reads_moved([one, other])
    homes.share(one, 16, 9)
    assert homes.reads_moved(one)
    assert tree.reads_moved([one]) and tree.reads_moved([other, one])
    assert not homes.reads_moved(other) and not tree.reads_moved([other])
    homes.retract(one)
    assert homes.world.allocator.has_moved_slots
    homes.prefill(one)
    assert not homes.reads_moved(one) and not tree.reads_moved([one])


def test_copied_blocks_stay_at_home() -> None:
    homes = Homes(Setup(page=1, block=4, slots=400, publish="exact", apply="copy"))
    req = homes.start(PROMPT)
    grow(homes, req, 16)
    homes.share(req, 16, 9)
    assert homes.world.controller.stats.blocks_shared == 1
    assert not homes.reads_moved(req) and not homes.world.tree.reads_moved([req])


def test_a_prefix_from_an_aliased_node_is_moved_behind_its_first_shared_position() -> None:
    homes = Homes(Setup(page=1, block=4, slots=400, publish="aliased"))
    first = homes.start(PROMPT, "first")
    grow(homes, first, 16)
    homes.share(first, 16, 9)
    text = [*first.origin_input_ids, *first.output_ids]
    homes.finish(first)
    tree = homes.world.tree
    for length in range(len(PROMPT), len(text)):
        # A prompt is matched but for its last token.
        req = homes.start([*text[:length], 99], f"r{length}")
        assert homes.reads_moved(req) == (length > 16)
        assert tree.reads_moved([req]) == (length > 16)
        homes.retract(req)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("publish", ["exact", "aliased"])
@pytest.mark.parametrize("seed", range(6))
def test_no_moved_slot_is_overlooked(seed: int, publish: str, page: int) -> None:
    """Conversations that go on over each other's prefixes, with retractions and eviction."""
    chance = random.Random(seed)
    homes = Homes(Setup(page=page, block=4, slots=480, publish=publish))
    tree = homes.world.tree
    running: list[Req] = []
    texts: list[list[int]] = [PROMPT]
    seen = {True: 0, False: 0}
    for step in range(250):
        what = chance.random()
        if len(running) < 3 and what < 0.2:
            text = chance.choice(texts)
            cut = chance.randint(len(PROMPT) // 2, len(text))
            running.append(homes.start([*text[:cut], 50 + chance.randrange(3)], f"r{step}"))
        elif running:
            req = chance.choice(running)
            length = len(req.origin_input_ids) + len(req.output_ids)
            if what < 0.25 or length > MAX_CONTEXT - 20:
                running.remove(req)
                texts = [*texts[-8:], [*req.origin_input_ids, *req.output_ids]]
                homes.finish(req)
            elif what < 0.3 and req.output_ids:
                homes.retract(req)
                homes.prefill(req)
            elif what < 0.55 and length > 24:
                at = chance.randrange(8, length - 8) // page * page
                homes.share(req, at, chance.randrange(0, at - 3) // page * page)
            elif homes.world.can_decode([req]):
                grow(homes, req, 4, first=chance.randrange(10, 14))
        for req in running:
            moved = homes.reads_moved(req)
            assert tree.reads_moved([req]) or not moved
            seen[moved] += 1
        assert tree.reads_moved(running) or not any(map(homes.reads_moved, running))
    assert min(seen.values()) > 10


def test_an_unknown_batch_counts_as_moved_once_something_was_shared() -> None:
    allocator = SimpleNamespace(has_moved_slots=False, has_holes=False)
    mark = MovedMark(allocator)
    known, equal = ["a"], ["a"]
    assert not mark.reads_moved(known) and not mark.reads_moved(None)
    allocator.has_moved_slots = True
    assert mark.reads_moved(known)
    mark.note(known, False)
    assert not mark.reads_moved(known)
    assert mark.reads_moved(equal) and mark.reads_moved(None)
    mark.note(known, True)
    assert mark.reads_moved(known)


def test_holes_count_in_both_modes_and_moved_slots_in_one() -> None:
    allocator = SimpleNamespace(has_moved_slots=True, has_holes=False)
    mark = MovedMark(allocator, corrected=False)
    assert not mark.reads_moved(None)
    allocator.has_holes = True
    assert mark.reads_moved(None)
    known = ["a"]
    mark.note(known, False)
    assert not mark.reads_moved(known)


def test_holes_are_those_of_the_row_at_hand(homes: Homes) -> None:
    """Not of a request beside it, and not of the row before a retraction."""
    one, other = homes.start(PROMPT, "one"), homes.start(PROMPT, "other")
    world = homes.world
    for req in (one, other):
        grow(homes, req, 16)
    world.controller.after_decode([one, other])
    world.evictor.waiting["one"] = [Drop(12, 2)]
    assert not world.tree.reads_holes([one, other])
    world.controller.after_decode([one, other])
    assert world.tree.reads_holes([other, one]) and not world.tree.reads_holes([other])
    assert (world.row(one) < 0).any() and not (world.row(other) < 0).any()
    homes.retract(one)
    homes.prefill(one)
    assert not world.tree.reads_holes([one, other])
    world.controller.after_decode([one])
    assert world.tree.reads_holes([one])
