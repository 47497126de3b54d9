# SPDX-License-Identifier: Apache-2.0
"""Tests the prefix tree of a model with attention and state layers (Mamba). Here a state holds the number of
positions it has seen, so a test notices if it is *published* (enters the tree) for another length."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context, get_exec, get_server_args

from sglang_reasoncache.cache.continuation import Continued, Part
from sglang_reasoncache.cache.continuations import Continuations
from tests.property.adder import adder_of
from tests.property.states import STATES, STRATEGIES, States
from tests.property.world import ENDS, OUTPUT, PROMPT, Pair, Setup

pytestmark = pytest.mark.usefixtures("any_length")


@pytest.fixture
def any_length(published_config: None) -> None:
    """Lets SGLang cache states after any number of tokens, not only multiples of a kernel's chunk size."""
    get_server_args()._mamba_cache_chunk_size = 1


@pytest.fixture(params=STRATEGIES)
def world(request: pytest.FixtureRequest) -> States:
    return States(request.param)


def test_a_row_that_shares_nothing_is_published_whole(world: States) -> None:
    req = world.start()
    if world.copies:
        world.track(req)
    tokens = [*req.origin_input_ids, *req.output_ids]
    world.finish(req)
    assert world.cached(tokens) == len(PROMPT) + OUTPUT
    world.assert_whole()


@pytest.mark.parametrize("dst", [8, 20])
def test_a_cut_row_publishes_no_state_of_another_length(world: States, dst: int) -> None:
    """Without copies of the state, nothing of a response that shares is published: the only state has seen
    all of it. With copies the response is published up to the last copy before the first shared position."""
    req = world.start(first=100)
    if world.copies:
        # Keep two copies of the state: after 15 positions, and after all positions.
        req.kv.mamba_prev_track_seqlen = None
        req.kv.mamba_last_track_seqlen = 15
        kept = req.kv.mamba_ping_pong_track_buffer[req.kv.mamba_next_track_idx]
        req.kv.mamba_last_track_idx = req.kv.mamba_next_track_idx
        req.kv.mamba_next_track_idx = 1 - req.kv.mamba_next_track_idx
        world.set_state(kept, 15)
        world.track(req)
    world.propose(req, Pair(len(PROMPT) + dst, len(PROMPT) + dst - 6))
    world.controller.after_decode([req])
    world.step(req)
    assert world.controller.pipeline.saved == 4
    tokens = [*req.origin_input_ids, *req.output_ids]
    prompt = 0 if world.copies else len(PROMPT)
    world.finish(req)
    assert world.cached(tokens) == (15 if world.copies and dst == 20 else prompt)
    world.assert_whole()


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_copy_that_a_forward_may_replace_is_not_published(
    any_length: None, in_flight: bool
) -> None:
    """With overlap, a request finishes while its next step runs. At the next multiple of the interval that step
    writes the older copy of the state, which is the one that fits a row cut at its first shared position."""
    interval = 15 if in_flight else 256
    with get_context().override_server_args(
        device="cpu", attention_backend="torch_native", mamba_track_interval=interval
    ):
        get_server_args()._mamba_cache_chunk_size = 1
        world = States("extra_buffer")
        req = world.start(first=100)
        kv = req.kv
        assert kv.kv_allocated_len == 30
        world.set_state(kv.mamba_ping_pong_track_buffer[0], 15)
        world.set_state(kv.mamba_ping_pong_track_buffer[1], 28)
        kv.mamba_next_track_idx = 0
        kv.mamba_last_track_idx = 1
        kv.mamba_prev_track_seqlen = 15
        kv.mamba_last_track_seqlen = 28
        world.propose(req, Pair(len(PROMPT) + 20, len(PROMPT) + 14))
        world.controller.after_decode([req])
        world.step(req)
        if in_flight:
            world.set_state(kv.mamba_ping_pong_track_buffer[0], 30)
        tokens = [*req.origin_input_ids, *req.output_ids]
        world.finish(req)
        assert world.cached(tokens) == (0 if in_flight else 15)
        world.assert_whole()


@pytest.mark.parametrize("end", ENDS)
def test_a_request_that_came_back_leaves_nothing_behind(world: States, end: str) -> None:
    """After a retraction the prefill covers prompt and output, so the prefill's state must not be published
    for the prompt."""
    req = world.start()
    world.end(req, "retract")
    world.tree.evict(EvictParams(num_tokens=world.total, mamba_num=STATES))
    world.come_back(req)
    if world.copies:
        world.track(req)
    prompt = [*req.origin_input_ids]
    assert world.cached(prompt) == 0
    world.propose(req, Pair(len(PROMPT) + 12, len(PROMPT) + 2))
    world.controller.after_decode([req])
    world.end(req, end)
    if end == "retract":
        world.come_back(req)
        world.finish(req)
    world.cached([*prompt, *req.output_ids])
    world.assert_whole()


def test_a_node_that_is_evicted_while_a_row_is_published_frees_its_own_slots(
    any_length: None,
) -> None:
    """Publishing a row that shares makes SGLang evict a node, because the pool of compressed states is full."""
    pool = {"enable_int8_mamba_checkpoint": True, "int8_mamba_ckpt_size": 2}
    facts = {"device": "cpu", "attention_backend": "torch_native"}
    with get_context().override_server_args(**facts, **pool):
        get_server_args()._mamba_cache_chunk_size = 1
        world = States("no_buffer")
        world.finish(world.start(first=300))
        req = world.start(first=100)
        world.propose(req, Pair(len(PROMPT) + 8, len(PROMPT) + 2))
        world.controller.after_decode([req])
        world.step(req)
        assert world.controller.pipeline.saved == 4
        world.finish(req)
        free = world.free_pages().tolist()
        assert len(free) == len(set(free))
        assert len(free) + world.tree.full_evictable_size() == world.total


@pytest.fixture(params=STRATEGIES)
def keeping(request: pytest.FixtureRequest) -> States:
    """A world whose finished requests become continuations."""
    return States(request.param, Setup(1, 4, 120, continues=True))


def _turn(world: States, first: int = 100) -> list[int]:
    """A request shares a block and finishes. Returns the tokens whose KV and state were computed."""
    req = world.start(first=first)
    world.propose(req, Pair(len(PROMPT) + 12, len(PROMPT) + 2))
    world.controller.after_decode([req])
    world.step(req)
    return _finished(world, req)


def _next_turn(world: States, tokens: list[int], response: Sequence[int]) -> list[int]:
    """A request goes on with ``tokens`` and finishes. Returns the tokens whose KV and state were computed."""
    req = world.request("next", [*tokens, *range(300, 320)])
    world.respond(req, response)
    assert isinstance(req.last_node, Continued) and req.last_node.length == len(tokens)
    assert req.prefix_len > len(PROMPT) + OUTPUT
    return _finished(world, req)


def _finished(world: States, req: Req) -> list[int]:
    if world.copies:
        world.track(req)
    world.finish(req)
    return [*req.origin_input_ids, *req.output_ids][: req.kv.kv_committed_len]


def test_the_next_turn_begins_with_the_state_behind_what_was_shared(keeping: States) -> None:
    tokens = _turn(keeping)
    assert keeping.cached(tokens) == len(tokens) == len(PROMPT) + OUTPUT + 2
    # The state has seen the last token, and all before it were read as the response read them.
    prompt = 0 if keeping.copies else len(PROMPT)
    assert keeping.cached(tokens[:-1]) == keeping.cached([*tokens[:-1], 9]) == prompt
    assert keeping.cached(tokens, opted_out=True) == prompt
    keeping.assert_whole()


def test_a_turn_goes_on_with_a_turn(keeping: States) -> None:
    tokens = _turn(keeping)
    more = _next_turn(keeping, tokens, range(400, 424))
    assert (keeping.cached(more), keeping.cached(tokens)) == (len(more), len(tokens))
    assert len(keeping.allocator.continuations) == 2
    keeping.assert_whole()


def test_a_state_that_a_request_began_with_is_not_evicted(keeping: States) -> None:
    """Until the first chunk is computed, which copies the state."""
    tokens = _turn(keeping)
    req = keeping.request("next", [*tokens, 5, 6])
    tree = keeping.tree
    req.init_next_round_input(tree)
    req.lock = tree.lock(req.last_node)
    assert tree.mamba_protected_size() == 1
    tree.evict(EvictParams(num_tokens=keeping.total, mamba_num=STATES))
    assert tree.mamba_evictable_size() == tree.evictable_size() == 0
    assert tree.mamba_protected_size() == 1 and len(keeping.allocator.continuations) == 1
    req.extend_end = len(req.full_untruncated_fill_ids)
    keeping.extend(req)
    checkpoint_kv_cache(req, tree)
    assert (tree.mamba_protected_size(), tree.mamba_evictable_size()) == (0, 1)
    keeping.abort(req)
    assert keeping.cached(tokens) == len(tokens)
    keeping.assert_whole()


def test_a_state_can_be_taken_while_the_request_runs(keeping: States) -> None:
    """SGLang may need its slot for a running request, and asserts that it finds one."""
    tokens = _turn(keeping)
    req = keeping.request("next", [*tokens, 5, 6])
    keeping.prefill(req)
    component = keeping.tree.components[ComponentType.MAMBA]
    pool = keeping.rows.mamba_allocator
    taken = pool.alloc(pool.available_size())
    with get_exec().mamba.override(enable_mamba_extra_buffer_lazy=True):
        pool.free(component._alloc_mamba_slot(req))
    pool.free(taken)
    keeping.finish(req)
    keeping.assert_whole()


def test_states_are_evicted_where_there_are_more(keeping: States) -> None:
    """Each turn leaves a state behind its prompt, if SGLang has none there yet, and one behind its response."""
    turns = [_turn(keeping, first) for first in (100, 200)]
    tree = keeping.tree
    states = tree.mamba_evictable_size()
    result = tree.evict(EvictParams(num_tokens=0, mamba_num=1))
    assert result.mamba_num_evicted == 1 == states - tree.mamba_evictable_size()
    # The first turn was used least recently. What serves nobody without its state is freed with it.
    assert keeping.cached(turns[0]) < len(turns[0])
    assert keeping.cached(turns[1]) == len(turns[1])
    keeping.assert_whole()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("evicted", [False, True], ids=["prefix-cached", "prefix-evicted"])
def test_a_retracted_request_goes_on_with_its_state(strategy: str, evicted: bool) -> None:
    """Its KV comes back from the host up to its last state, which comes back, too."""
    world = States(strategy, Setup(page=1, block=4, slots=120, swap=1 << 20))
    req = world.start()
    if world.copies:
        world.track(req)
    world.step(req)
    world.step(req)
    length = req.kv.kv_committed_len - 2 * world.copies
    world.retract(req)
    if evicted:
        world.tree.evict(EvictParams(num_tokens=world.total, mamba_num=STATES))
        for slot in range(1, STATES + 1):
            world.set_state(torch.tensor(slot), -1)
    req.init_next_round_input(world.tree)
    adder = adder_of(world, [], 1 << 12)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert adder.can_run_list == [req] and req.prefix_len == length
    assert req.kv.mamba_cow_src_index is None and not req.kv.mamba_needs_clear
    state = world.rows.mamba_pool.mamba_cache
    assert state.temporal[0, req.kv.mamba_pool_idx].unique().tolist() == [length]
    assert state.conv[0][0, req.kv.mamba_pool_idx].unique().tolist() == [length]
    world.write(world.extend(req), [1] * req.extend_len)
    world.step(req)
    world.finish(req)
    world.assert_whole()


def test_a_state_that_comes_back_has_no_ring_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--enable-linear-replayssm`` a ring beside each state holds its newest tokens. An aborted request
    leaves its ring behind in its slot, which the request that comes back may get."""
    world = States("no_buffer", Setup(page=1, block=4, slots=120, swap=1 << 20))
    rings = torch.zeros(STATES + 1, dtype=torch.int32)
    monkeypatch.setattr(world.rows.mamba_pool, "replayssm_write_pos", rings)
    req = world.start()
    world.step(req)
    world.retract(req)
    other = world.request("other", [50, 51, 52, 53])
    world.prefill(other)
    slot = int(other.kv.mamba_pool_idx)
    rings[slot] = 5
    world.abort(other)
    states = world.rows.mamba_allocator
    states.alloc(states.available_size() - 1)
    rings.fill_(5)
    req.init_next_round_input(world.tree)
    adder = adder_of(world, [], 1 << 12)
    adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
    assert adder.can_run_list == [req] and not req.kv.mamba_needs_clear
    assert rings[req.kv.mamba_pool_idx] == 0


def test_a_state_ahead_of_the_tokens_is_not_kept() -> None:
    """A step in flight has taken the only state further than the tokens that SGLang knows."""
    world = States("no_buffer", Setup(page=1, block=4, slots=120, swap=1 << 20))
    req = world.start()
    world.decode([req])
    world.retract(req)
    req.init_next_round_input(world.tree)
    assert req.prefix_len + req.host_hit_length == len(PROMPT)
    world.give_up(req)
    world.assert_whole()


def test_a_long_conversation_keeps_its_newest_turns(keeping: States) -> None:
    """If states are missing, the oldest turns lose theirs, which a next turn does not need."""
    tokens = _turn(keeping)
    for _ in range(3):
        tokens = _next_turn(keeping, tokens, [400, 401])
    there = keeping.allocator.continuations
    assert there.evictable_endings == 4
    there.evict_endings(3, keeping.tree._free_continued)
    assert len(there) == 4 and keeping.cached(tokens) == len(tokens)
    # Nobody needs what is before the newest turn without it.
    there.evict_endings(1, keeping.tree._free_continued)
    assert len(there) == 0
    keeping.assert_whole()


def test_a_turn_behind_exact_kv_is_kept(keeping: States) -> None:
    """A response that lent pages to siblings and shared nothing is a continuation, too, and exact."""
    tokens = _turn(keeping)
    [node] = keeping.allocator.continuations
    node.exact = len(node)
    more = _next_turn(keeping, tokens, range(400, 404))
    assert keeping.cached(more) == keeping.cached(more, opted_out=True) == len(more)
    keeping.assert_whole()


def test_a_fresh_state_replaces_a_lost_one(keeping: States) -> None:
    """A turn lost its state while another goes on with it. Computed again, it is cached again."""
    tokens = _turn(keeping)
    _next_turn(keeping, tokens, [400, 401])
    keeping.allocator.continuations.evict_endings(1, keeping.tree._free_continued)
    assert keeping.cached(tokens) < len(tokens)
    assert _turn(keeping) == tokens and keeping.cached(tokens) == len(tokens)
    keeping.assert_whole()


def test_a_match_keeps_the_state_that_it_needs(keeping: States) -> None:
    """No slot is free. To copy the state of a shorter prefix SGLang evicts one, but not this prompt's."""
    old = _turn(keeping, 100)
    _turn(keeping, 200)
    states = keeping.rows.mamba_allocator
    taken = states.alloc(states.available_size())
    assert keeping.cached(old) == len(old)
    states.free(taken)
    keeping.assert_whole()


def test_a_thousand_turns_are_evicted_at_once() -> None:
    """All states but the newest are gone. Evicting that one frees all turns."""
    slots = torch.arange(1, 17)
    there = Continuations(1)
    parent = None
    tokens = list[int]()
    for turn in range(1200):
        tokens += [turn] * 16
        first = next(reversed(list(there)), None)
        parts = [Part(each, 16) for each in (first, parent) if each is not None]
        prefix = Continued(parts) if parts else None
        kept = there.add(
            RadixKey(tokens), prefix, 0, 16 * turn, slots, np.zeros(16, dtype=np.int64), 0,
            np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), {}, torch.tensor([turn]),
        )  # fmt: skip
        assert kept
        [parent] = [each for each in there if each.start == 16 * turn]
    freed = list[int]()

    def free(slots: torch.Tensor, known: np.ndarray, state: torch.Tensor | None) -> int:
        freed.extend([] if state is None else state.tolist())
        return len(slots)

    there.evict_endings(1199, free)
    assert freed == [*range(1199)] and len(there) == 1200
    assert there.evict_endings(1, free) == 1200 * 16 and len(there) == there.evictable == 0
