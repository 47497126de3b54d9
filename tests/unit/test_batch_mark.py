# SPDX-License-Identifier: Apache-2.0
"""Whether a batch reads shifted slots or evicted positions, as the host knows it.
``tests/property`` checks after each rule that none is overlooked; here: that few are seen which are
not there."""

import pytest
from sglang.srt.managers.schedule_batch import Req

from tests.property import world as worlds
from tests.property.world import PROMPT, Eviction, Pair, Setup, World, prefill, retract, start

pytestmark = pytest.mark.usefixtures("published_config")


def world_of(publish: str) -> World:
    return World(Setup(page=1, block=4, slots=400, publish=publish))


def share(world: World, req: Req) -> None:
    """The block at 16 is redirected to the one at 9."""
    world.controller.after_decode([req])
    worlds.propose(world, req, Pair(16, 9))
    world.controller.after_decode([req])
    assert world.controller.stats.blocks_shared == 1


@pytest.mark.parametrize("publish", ["exact", "aliased"])
def test_only_the_request_whose_block_was_redirected(publish: str) -> None:
    world = world_of(publish)
    one, other = start(world, "one"), start(world, "other", first=200)
    tree = world.tree
    assert not tree.reads_shifted([one, other])
    share(world, one)
    assert world.has_shifted(one) and not world.has_shifted(other)
    assert tree.reads_shifted([one]) and tree.reads_shifted([other, one])
    assert not tree.reads_shifted([other])
    retract(world, one)
    assert world.allocator.has_shifted_slots
    prefill(world, one)
    assert not world.has_shifted(one) and not tree.reads_shifted([one])


def test_a_prefix_from_an_aliased_node_is_shifted_behind_its_first_shared_position() -> None:
    world = world_of("aliased")
    first = start(world, "first")
    share(world, first)
    text = [*first.origin_input_ids, *first.output_ids]
    worlds.finish(world, first)
    for length in range(len(PROMPT), len(text)):
        # A prompt is matched but for its last token.
        req = world.request(f"r{length}", [*text[:length], 99])
        prefill(world, req)
        assert world.has_shifted(req) == world.tree.reads_shifted([req]) == (length > 16)
        retract(world, req)


def test_evicted_positions_are_those_of_the_row_at_hand() -> None:
    """Not of a request beside it, and not of the row before a retraction."""
    world = world_of("aliased")
    one, other = start(world, "one"), start(world, "other", first=200)
    tree, after_decode = world.tree, world.controller.after_decode
    world.evictor.waiting["one"] = [Eviction(12, 2)]
    assert not any(tree.evicted_of([one, other]))
    worlds.decode(world, one)
    after_decode([one, other])
    assert any(tree.evicted_of([other, one])) and not any(tree.evicted_of([other]))
    assert (world.row(one) < 0).any() and not (world.row(other) < 0).any()
    retract(world, one)
    prefill(world, one)
    assert not any(tree.evicted_of([one, other]))
    after_decode([one])
    assert any(tree.evicted_of([one]))
