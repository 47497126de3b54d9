# SPDX-License-Identifier: Apache-2.0
"""Tests sharing between requests of a *group* (same prompt, ``extra_key``, ``cache_salt`` and ``lora_id``) in
SGLang's pools and release path. ``tests/property/test_groups.py`` tests the same with random requests."""

from __future__ import annotations

import re
from array import array
from typing import Any

import numpy as np
import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_reasoncache.config import ConfigError, ReasonCacheConfig
from sglang_reasoncache.custom_params import OPT_OUT_KEY
from sglang_reasoncache.filter.matcher import AcrossPair
from tests.eviction.rows import everything_comes_back as everything_comes_back
from tests.property.world import OUTPUT, PROMPT, Pair, ScriptedEngine, Setup, World
from tests.unit.test_pipeline import assert_judged, state

SETUPS = [Setup(page=1, block=4, slots=200), Setup(page=4, block=4, slots=240, need_sort=True)]
ALL_SETUPS = pytest.mark.parametrize("setup", SETUPS, ids=str)


class GroupEngine(ScriptedEngine):
    """Also proposes the blocks in ``lent``, whose source is another request. Records each request's group."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: dict[int, list[AcrossPair]] = {}
        self.groups: dict[int, int] = {}

    def join(self, request: int, group: int) -> None:
        self.groups[request] = group

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        for request in requests:
            found = self.lent.pop(request, [])
            self.waiting[request] += [Pair(0, 0)] * bool(found)
            super().feed(array("q", [request]), counts, tokens)
            if found:
                self._results[-1] = self._results[-1]._replace(pairs=(), across=tuple(found))


def world_of(setup: Setup, **options: Any) -> World:
    return World(setup, engine=GroupEngine(), **options)


def lend(world: World, source: Req, reader: Req, *pairs: Pair) -> int:
    """Proposes that blocks of ``reader`` read slots of ``source``; returns how many slots become free."""
    lent = [AcrossPair(*pair, state(source).followed.id) for pair in pairs]
    world.engine.lent[state(reader).followed.id] = lent
    world.step(reader)
    reqs = running(world)
    assert world.controller.after_decode(reqs) == 0
    freed = world.controller.after_decode(reqs)
    balance(world)
    return freed


def running(world: World) -> list[Req]:
    return sorted((req for req in world.requests if req.kv.holds_kv), key=lambda req: req.rid)


def two(setup: Setup, **options: Any) -> tuple[World, Req, Req]:
    world = world_of(setup, **options)
    return world, world.start("source"), world.start("reader", first=200)


def balance(world: World) -> None:
    """Checks that SGLang's slots add up, and that no request reads a free slot."""
    tree = world.tree
    books = world.allocator.available_size() + tree.evictable_size() + tree.protected_size()
    private = sum(kv_private_tokens(req.kv, world.page) for req in running(world))
    assert books + private - world.controller.report.slots_saved == world.total
    for req in running(world):
        assert not np.isin(world.row(req) // world.page, world.free_pages()).any()


@ALL_SETUPS
def test_what_two_requests_have_stays_where_it_is(setup: Setup) -> None:
    """A block is not redirected if two rows name its slots. A slot that a row names twice counts as saved."""
    world, source, reader = two(setup)
    assert lend(world, source, reader, Pair(12, 20)) == 4
    rows = world.row(source).copy(), world.row(reader).copy()
    for req, pair in ((source, Pair(20, 8)), (reader, Pair(12, 24))):
        world.propose(req, pair)
        assert world.controller.after_decode([source, reader]) == 0
    refused = world.controller.stats.refusals
    assert refused == {"across": 1, "overlap": 1}
    assert lend(world, source, reader, Pair(24, 20)) == 4
    pipeline = world.controller.pipeline
    assert (pipeline.across, pipeline.redirector.within) == (4, 4)
    # A third request reads slots that the reader reads from the source.
    third = world.start("third", first=300)
    assert lend(world, reader, third, Pair(16, 12)) == 4
    assert (world.row(third)[16:20] == rows[0][20:24]).all()
    assert (pipeline.across, pipeline.redirector.within) == (8, 4)
    described = {"prompt_tokens": len(PROMPT), "requests": 3, "slots_saved_within_now": 4}
    assert world.controller.describe()["groups"] == [{**described, "slots_read_across": 8}]
    world.finish(source)
    world.abort(reader)
    balance(world)
    assert (pipeline.across, pipeline.redirector.within) == (0, 0)
    told = world.controller.describe()
    assert told["slots_saved_across_now"] == 0 and told["groups"] == []


@pytest.mark.parametrize(
    ("pair", "age", "refusal"),
    [
        (Pair(12, 20), 12, "too_young"), (Pair(20, 12), 12, "too_young"),
        (Pair(12, 0), 0, "tree_owned"), (Pair(0, 12), 0, "tree_owned"),
        (Pair(12, 28), 0, "not_written"), (Pair(12, 12), 12, ""),
    ],
)  # fmt: skip
def test_blocks_that_may_not_be_lent(pair: Pair, age: int, refusal: str) -> None:
    world, source, reader = two(SETUPS[1], min_age=age)
    freed = lend(world, source, reader, pair)
    assert_judged(world, freed, refusal)


@ALL_SETUPS
@pytest.mark.parametrize("again", [False, True])
def test_a_reader_waits_for_a_source_that_was_retracted_too(setup: Setup, again: bool) -> None:
    world, source, reader = two(setup)
    assert lend(world, source, reader, Pair(12, 20)) == 4
    world.retract(source)
    for _ in range(1 + again):
        world.retract(reader)
        world.come_back(reader)
        for _ in range(3):
            assert world.controller.after_decode([reader]) == 0, "nothing to read yet"
        balance(world)
    world.come_back(source)
    freed = [world.controller.after_decode([reader, source]) for _ in range(4)]
    assert sum(freed) == 4 and freed[-1] == 0
    assert (world.row(reader)[12:16] == world.row(source)[20:24]).all()
    balance(world)
    assert not state(reader).pending and len(state(reader).redirected) == 1


def test_nothing_waits_for_a_source_that_has_left() -> None:
    world, source, reader = two(SETUPS[0])
    assert lend(world, source, reader, Pair(12, 20)) == 4
    for req in (source, reader):
        world.retract(req)
    world.come_back(reader)
    world.controller.after_decode([reader])
    assert len(state(reader).pending) == 1
    source.finished_reason = FINISH_ABORT("client left")
    world.controller.after_decode([reader])
    assert not state(reader).pending and world.controller.pipeline.ledger.slots == 0


@pytest.mark.parametrize(
    ("values", "bound"),
    [
        ({"preset": "reasoncache"}, "unless match=runs"),
        ({"random_ratio": 0.3}, "unless match=runs"),
        ({"policy": "reasoncache+rkv:budget=90"}, "beside a policy that evicts"),
    ],
)
def test_what_does_not_go_with_it(values: dict[str, Any], bound: str) -> None:
    ReasonCacheConfig.from_mapping({"scope": "prompt"})
    told = f"--reasoncache-scope must be response {bound}, got 'prompt'"
    with pytest.raises(ConfigError, match=re.escape(told)):
        ReasonCacheConfig.from_mapping({"scope": "prompt", **values})
    ReasonCacheConfig.from_mapping({"reads_prompt": True})
    with pytest.raises(ConfigError, match=f"reads_prompt.* must be false {bound}"):
        ReasonCacheConfig.from_mapping({"reads_prompt": True, **values})


#: How a request differs from a plain one, and whether the two are in one group.
KEYS: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"cache_salt": "another"}, False),
    ({"extra_key": "another"}, False),
    ({"lora_id": "adapter"}, False),
    # SGLang joins these to the extra key "adapter". A request with lora_id "adapter" has the same extra key.
    ({"extra_key": "ad", "lora_id": "apter"}, False),
    ({"positional_embed_overrides": object()}, False),
    ({"opts_out": True}, False),
    ({"prompt": [1, 2, 3, 4, 5, 7]}, False),
]


def alike(one: Any, other: Any) -> bool:
    group = state(one).group
    return group is not None and group is state(other).group


@pytest.mark.parametrize(("key", "same"), KEYS)
def test_a_request_of_another_key_is_never_a_source(key: dict[str, Any], same: bool) -> None:
    """A request never reads slots of a request in another group, even if the filter proposes such a block."""
    world = world_of(SETUPS[0])
    made = [
        began(world, i, dict(one)) for i, one in enumerate(({}, key, {"lora_id": "adapter"}, key))
    ]
    plain, other, adapted, twin = made
    assert alike(plain, other) == alike(other, plain) == same
    assert alike(adapted, other) == (key == {"lora_id": "adapter"})
    takes_part = key.keys().isdisjoint({"opts_out", "positional_embed_overrides"})
    assert alike(other, twin) == takes_part
    if takes_part:
        freed = [lend(world, other, plain, Pair(12, 12)), lend(world, plain, other, Pair(12, 12))]
        assert freed == ([4, 0] if same else [0, 0])
        assert world.controller.stats.refusals == ({"same_slots": 1} if same else {"late": 2})
    for req in made:
        world.finish(req)
    world.assert_empty()


def began(world: World, name: int, key: dict[str, Any]) -> Req:
    params = SamplingParams(custom_params={OPT_OUT_KEY: not key.pop("opts_out", False)})
    prompt = array("q", key.pop("prompt", PROMPT))
    req = Req(str(name), "", prompt, params, **key)
    world.requests.add(req)
    world.respond(req, range(100 * name, 100 * name + 1 + OUTPUT))
    world.controller.after_decode([req])
    return req


CONTINUING = [
    Setup(page=1, block=4, slots=200, core="rust", continues=True),
    Setup(page=4, block=4, slots=240, continues=True),
]


def cached(world: World, req: Req, opted_out: bool = False) -> int:
    """How many tokens of a prompt that goes on with the response of ``req`` are cached."""
    tokens = [*req.origin_input_ids, *req.output_ids, 900, 901]
    following = world.request("following", tokens, opted_out)
    following.init_next_round_input(world.tree)
    return following.prefix_len


@pytest.mark.parametrize("setup", CONTINUING, ids=str)
@pytest.mark.parametrize("first", ["source", "reader"])
def test_what_siblings_read_stays_cached(setup: Setup, first: str) -> None:
    """Both responses, whichever ends first, and each slot once. The source's KV is exact."""
    world, source, reader = two(setup, max_rows=5)
    assert lend(world, source, reader, Pair(12, 8)) == 4
    page = setup.page
    whole = {
        req: (len(PROMPT) + len(req.output_ids) - 1) // page * page for req in (source, reader)
    }
    for req in (source, reader) if first == "source" else (reader, source):
        world.finish(req)
        balance(world)
        assert cached(world, req) == whole[req]
    assert cached(world, source, opted_out=True) == whole[source]
    assert cached(world, reader, opted_out=True) == 12
    there = world.allocator.continuations
    assert (len(there), len(there.lent), there.aliased) == (2, 4 // page, 4)
    slots = world.total - world.allocator.available_size()
    world.tree.evict(EvictParams(num_tokens=1000))
    assert world.total - world.allocator.available_size() == 0 < slots
    assert not world.allocator.references and not len(there.lent)


@pytest.mark.parametrize("setup", CONTINUING, ids=str)
def test_a_sibling_that_runs_keeps_what_it_reads(setup: Setup) -> None:
    world, source, reader = two(setup)
    assert lend(world, source, reader, Pair(12, 8)) == 4
    contents = world.contents()[world.row(reader)].tolist()
    world.finish(source)
    evictable = world.tree.evictable_size()
    before = world.allocator.available_size()
    world.tree.evict(EvictParams(num_tokens=1000))
    assert world.allocator.available_size() - before == evictable
    balance(world)
    assert world.contents()[world.row(reader)].tolist() == contents
    # The reader is evicted whole, once it has finished: nobody else names the source's slots any more.
    world.finish(reader)
    balance(world)
    world.tree.evict(EvictParams(num_tokens=1000))
    assert world.allocator.available_size() == world.total
    world.assert_empty()
