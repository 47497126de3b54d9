# SPDX-License-Identifier: Apache-2.0
"""Tests the prefix tree of a model with attention and state layers (Mamba). Here a state holds the number of
positions it has seen, so a test notices if it is *published* (enters the tree) for another length."""

import pytest
import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context, get_server_args

from tests.property.world import ENDS, MAX_CONTEXT, MAX_ROWS, OUTPUT, PROMPT, Pair, Setup, World

pytestmark = pytest.mark.usefixtures("any_length")
STATES = 24
STRATEGIES = ["no_buffer", "extra_buffer"]


@pytest.fixture
def any_length(published_config: None) -> None:
    """Lets SGLang cache states after any number of tokens, not only multiples of a kernel's chunk size."""
    get_server_args()._mamba_cache_chunk_size = 1


class States(World):
    def __init__(self, strategy: str) -> None:
        self.copies = strategy == "extra_buffer"
        super().__init__(Setup(1, 4, 120))

    def make_rows(self) -> HybridReqToTokenPool:
        shape = Mamba2StateShape.create(
            **dict(tp_world_size=1, intermediate_size=4, n_groups=1, num_heads=1),
            **dict(head_dim=4, state_size=2, conv_kernel=2),
        )
        return HybridReqToTokenPool(
            **dict(size=MAX_ROWS, mamba_size=STATES, mamba_spec_state_size=MAX_ROWS),
            **dict(max_context_len=MAX_CONTEXT, device="cpu", enable_memory_saver=False),
            cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
            mamba_layer_ids=[0],
            enable_mamba_extra_buffer=self.copies,
        )

    def set_components(self, params: CacheInitParams) -> None:
        params.tree_components = (ComponentType.FULL, ComponentType.MAMBA)
        params.enable_mamba_extra_buffer = self.copies

    def write(self, slots: object, contents: object) -> None:
        """Acts as a forward pass: afterwards each request's state has seen all positions of the request."""
        super().write(slots, contents)  # type: ignore[arg-type]
        for req in self.requests if hasattr(self, "controller") else ():
            if req.kv.holds_mamba and req.kv.holds_kv:
                self.set_state(req.kv.mamba_pool_idx, req.kv.kv_allocated_len)

    def set_state(self, slot: torch.Tensor, positions: int) -> None:
        for state in (
            self.rows.mamba_pool.mamba_cache.temporal,
            self.rows.mamba_pool.mamba_cache.conv[0],
        ):
            state[:, slot] = positions

    def track(self, req: Req) -> None:
        """Copies the request's state, and keeps the previous copy too. SGLang does this at intervals."""
        kv = req.kv
        pool = self.rows
        kv.mamba_last_track_idx = kv.mamba_next_track_idx
        kv.mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)
        kv.mamba_prev_track_seqlen = kv.mamba_last_track_seqlen
        kv.mamba_last_track_seqlen = kv.kv_committed_len
        slot = kv.mamba_ping_pong_track_buffer[kv.mamba_last_track_idx]
        self.set_state(slot, kv.kv_committed_len)

    def cached(self, tokens: list[int]) -> int:
        """How many of ``tokens`` a new request finds cached. Checks that the cached state has seen as many."""
        req = self.request("again", [*tokens, 1])
        req.init_next_round_input(self.tree)
        found = req.prefix_len
        if found:
            seen = self.rows.mamba_pool.mamba_cache.temporal[0, req.kv.mamba_cow_src_index]
            assert seen.unique().tolist() == [found]
            self.rows.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(0))
            req.kv.mamba_pool_idx = None
        return found

    def assert_whole(self) -> None:
        """Check that slots and states are free or evictable, and that all are free once the tree is empty."""
        free = self.allocator.available_size()
        states = self.rows.mamba_allocator.available_size()
        assert free + self.tree.full_evictable_size() == self.total
        assert states + self.tree.mamba_evictable_size() == STATES
        self.tree.evict(EvictParams(num_tokens=self.total, mamba_num=STATES))
        assert self.allocator.available_size() == self.total
        assert self.rows.mamba_allocator.available_size() == STATES


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
