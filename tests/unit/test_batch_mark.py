# SPDX-License-Identifier: Apache-2.0
"""Whether a batch reads shifted slots, as the host knows it, against what rows and cached positions say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

from sglang_reasoncache.cache.batch_mark import BatchMark
from sglang_reasoncache.eviction.policies.contract import Eviction
from tests.property.world import MAX_CONTEXT, Pair, Setup, World

pytestmark = pytest.mark.usefixtures("published_config")

PROMPT = list(range(1, 9))
TOKENS = 5


class CachedAt:
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

    def reads_shifted(self, req: Req) -> bool:
        """What the rows and cached positions say."""
        row = self.world.row(req)
        return bool((self.at[row] != np.arange(len(row))).any())


def grow(cached_at: CachedAt, req: Req, count: int, first: int = 10) -> None:
    for i in range(count):
        cached_at.decode(req, first + i)


@pytest.fixture(params=["exact", "aliased"])
def cached_at(request: pytest.FixtureRequest) -> CachedAt:
    return CachedAt(Setup(page=1, block=4, slots=400, publish=request.param))


def test_only_the_request_whose_block_was_redirected(cached_at: CachedAt) -> None:
    one, other = cached_at.start(PROMPT, "one"), cached_at.start(PROMPT, "other")
    for req in (one, other):
        grow(cached_at, req, 16)
    tree = cached_at.world.tree
    assert not tree.reads_shifted([one, other])
    cached_at.share(one, 16, 9)
    assert cached_at.reads_shifted(one)
    assert tree.reads_shifted([one]) and tree.reads_shifted([other, one])
    assert not cached_at.reads_shifted(other) and not tree.reads_shifted([other])
    cached_at.retract(one)
    assert cached_at.world.allocator.has_shifted_slots
    cached_at.prefill(one)
    assert not cached_at.reads_shifted(one) and not tree.reads_shifted([one])


def test_copied_blocks_stay_where_cached() -> None:
    cached_at = CachedAt(Setup(page=1, block=4, slots=400, publish="exact", apply="copy"))
    req = cached_at.start(PROMPT)
    grow(cached_at, req, 16)
    cached_at.share(req, 16, 9)
    assert cached_at.world.controller.stats.blocks_shared == 1
    assert not cached_at.reads_shifted(req) and not cached_at.world.tree.reads_shifted([req])


def test_a_prefix_from_an_aliased_node_is_shifted_behind_its_first_shared_position() -> None:
    cached_at = CachedAt(Setup(page=1, block=4, slots=400, publish="aliased"))
    first = cached_at.start(PROMPT, "first")
    grow(cached_at, first, 16)
    cached_at.share(first, 16, 9)
    text = [*first.origin_input_ids, *first.output_ids]
    cached_at.finish(first)
    tree = cached_at.world.tree
    for length in range(len(PROMPT), len(text)):
        # A prompt is matched but for its last token.
        req = cached_at.start([*text[:length], 99], f"r{length}")
        assert cached_at.reads_shifted(req) == (length > 16)
        assert tree.reads_shifted([req]) == (length > 16)
        cached_at.retract(req)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("publish", ["exact", "aliased"])
@pytest.mark.parametrize("seed", range(6))
def test_no_shifted_slot_is_overlooked(seed: int, publish: str, page: int) -> None:
    """Conversations that go on over each other's prefixes, with retractions and eviction."""
    chance = random.Random(seed)
    cached_at = CachedAt(Setup(page=page, block=4, slots=480, publish=publish))
    tree = cached_at.world.tree
    running: list[Req] = []
    texts: list[list[int]] = [PROMPT]
    seen = {True: 0, False: 0}
    for step in range(250):
        what = chance.random()
        if len(running) < 3 and what < 0.2:
            text = chance.choice(texts)
            cut = chance.randint(len(PROMPT) // 2, len(text))
            running.append(cached_at.start([*text[:cut], 50 + chance.randrange(3)], f"r{step}"))
        elif running:
            req = chance.choice(running)
            length = len(req.origin_input_ids) + len(req.output_ids)
            if what < 0.25 or length > MAX_CONTEXT - 20:
                running.remove(req)
                texts = [*texts[-8:], [*req.origin_input_ids, *req.output_ids]]
                cached_at.finish(req)
            elif what < 0.3 and req.output_ids:
                cached_at.retract(req)
                cached_at.prefill(req)
            elif what < 0.55 and length > 24:
                at = chance.randrange(8, length - 8) // page * page
                cached_at.share(req, at, chance.randrange(0, at - 3) // page * page)
            elif cached_at.world.can_decode([req]):
                grow(cached_at, req, 4, first=chance.randrange(10, 14))
        for req in running:
            shifted = cached_at.reads_shifted(req)
            assert tree.reads_shifted([req]) or not shifted
            seen[shifted] += 1
        assert tree.reads_shifted(running) or not any(map(cached_at.reads_shifted, running))
    assert min(seen.values()) > 10


def test_an_unknown_batch_counts_as_shifted_once_something_was_shared() -> None:
    allocator = SimpleNamespace(has_shifted_slots=False, has_evicted=False)
    mark = BatchMark(allocator)
    known, equal = ["a"], ["a"]
    assert not mark.reads_shifted(known) and not mark.reads_shifted(None)
    allocator.has_shifted_slots = True
    assert mark.reads_shifted(known)
    mark.note(known, False)
    assert not mark.reads_shifted(known)
    assert mark.reads_shifted(equal) and mark.reads_shifted(None)
    mark.note(known, True)
    assert mark.reads_shifted(known)


def test_evicted_positions_count_in_both_modes_and_shifted_slots_in_one() -> None:
    allocator = SimpleNamespace(has_shifted_slots=True, has_evicted=False)
    mark = BatchMark(allocator, corrected=False)
    assert not mark.reads_shifted(None)
    allocator.has_evicted = True
    assert mark.reads_shifted(None)
    known = ["a"]
    mark.note(known, False)
    assert not mark.reads_shifted(known)


def test_evicted_positions_are_those_of_the_row_at_hand(cached_at: CachedAt) -> None:
    """Not of a request beside it, and not of the row before a retraction."""
    one, other = cached_at.start(PROMPT, "one"), cached_at.start(PROMPT, "other")
    world = cached_at.world
    for req in (one, other):
        grow(cached_at, req, 16)
    world.controller.after_decode([one, other])
    world.evictor.waiting["one"] = [Eviction(12, 2)]
    assert not world.tree.reads_evicted([one, other])
    world.controller.after_decode([one, other])
    assert world.tree.reads_evicted([other, one]) and not world.tree.reads_evicted([other])
    assert (world.row(one) < 0).any() and not (world.row(other) < 0).any()
    cached_at.retract(one)
    cached_at.prefill(one)
    assert not world.tree.reads_evicted([one, other])
    world.controller.after_decode([one])
    assert world.tree.reads_evicted([one])
