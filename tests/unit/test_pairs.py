# SPDX-License-Identifier: Apache-2.0
"""Tests with a tree whose keys are pairs of tokens, as they are where EAGLE drafts: the key of a position has
the next token, too. SGLang publishes one position fewer than it is given tokens, and fails if the tree owns
more of the row."""

import pytest
from sglang.srt.managers.schedule_batch import Req

from tests.property.world import PROMPT, Pair, Setup, World
from tests.unit.test_across import lend, two

pytestmark = pytest.mark.usefixtures("published_config")

SETUPS = [
    Setup(page=page, block=4, slots=200, core=core, continues=continues, pairs=True)
    for page in (1, 4)
    for core, continues in (("python", True), ("rust", False))
]
ALL_SETUPS = pytest.mark.parametrize("setup", SETUPS, ids=str)


def cached(world: World, req: Req) -> int:
    """How many tokens of the same prompt and response are cached, for a request that reads exact KV only."""
    tokens = [*req.origin_input_ids, *req.output_ids, 900, 901]
    following = world.request("following", tokens, opted_out=True)
    following.init_next_round_input(world.tree)
    return following.prefix_len


@pytest.mark.parametrize("equal", [1, 8])
@ALL_SETUPS
def test_a_retracted_request_comes_back_to_a_cached_prompt(setup: Setup, equal: int) -> None:
    """A sibling has finished with the same first tokens of its response."""
    world = World(setup)
    prompt = range(1, 9)
    sibling = world.request("sibling", prompt)
    world.respond(sibling, range(100, 125))
    req = world.request("r", prompt)
    world.respond(req, [*range(100, 100 + equal), *range(200, 225)])
    world.controller.after_decode([req])
    world.finish(sibling)
    world.retract(req)
    world.come_back(req)
    owned = (len(prompt) + equal - 1) // setup.page * setup.page
    assert req.kv.cache_protected_len == owned
    # The first position that the tree does not own is redirected.
    world.controller.after_decode([req])
    world.propose(req, Pair(owned, 24))
    for _ in range(3):
        world.controller.after_decode([req])
    assert world.controller.pipeline.saved == 4
    world.finish(req)
    assert cached(world, req) == owned
    world.assert_empty()


@ALL_SETUPS
def test_a_source_that_begins_in_the_last_page_of_the_prompt(setup: Setup) -> None:
    """A slot of the page that straddles the prompt's end is named twice."""
    world = World(setup)
    req = world.start()
    start = req.kv.cache_protected_len
    assert start == (len(PROMPT) - 1) // setup.page * setup.page
    world.propose(req, Pair(12, len(PROMPT)))
    for _ in range(3):
        world.controller.after_decode([req])
    assert world.controller.pipeline.saved == 4
    world.finish(req)
    # What a continuation names twice is the continuation's, from the page on where it begins.
    named = len(PROMPT) // setup.page * setup.page
    node = next(iter(world.allocator.continuations), None)
    assert node.start == named if node is not None else not setup.continues
    assert cached(world, req) == 12
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    world.assert_empty()


@pytest.mark.parametrize("first", ["source", "reader"])
@ALL_SETUPS
def test_a_sibling_reads_the_last_page_of_the_prompt(setup: Setup, first: str) -> None:
    world, source, reader = two(setup)
    assert lend(world, source, reader, Pair(12, len(PROMPT))) == 4
    for req in (source, reader) if first == "source" else (reader, source):
        world.finish(req)
    assert cached(world, reader) == 12
    assert world.allocator.available_size() + world.tree.evictable_size() == world.total
    world.assert_empty()


@ALL_SETUPS
def test_all_that_is_exact_is_published(setup: Setup) -> None:
    """No position less, although the next one is shared: of that one, only the token is in the key."""
    world = World(setup)
    req = world.start()
    world.propose(req, Pair(16, 24))
    for _ in range(3):
        world.controller.after_decode([req])
    exact = world.row(req)[:16].tolist()
    world.finish(req)
    assert cached(world, req) == 16
    found = world.tree.all_values_flatten().tolist()
    assert sorted(found) == sorted(exact)
    world.assert_empty()
