# SPDX-License-Identifier: Apache-2.0
"""No path from a decode or prefill step waits for the device, and none does what a device forbids.

Our code on SGLang's pools, allocators and trees, on the stand-in and, where there is one, on a GPU.
Stock SGLang waits in ``PagedTokenToKVPoolAllocator.free`` (``torch.unique``), which nothing of ours
calls. Ours waits in ``free`` and ``free_page_ids`` alone, of slots that nobody knows: SGLang frees
so when an allocation for a part of a batch fails."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.held import AttentionSource
from sglang_reasoncache.eviction.policies.by_attention import H2O, RKV
from sglang_reasoncache.eviction.policies.by_keys import KeyDiff, L2Norm
from sglang_reasoncache.eviction.policies.contract import (
    KEYS,
    Eviction,
    RequestView,
    StatisticsNeeds,
)
from sglang_reasoncache.eviction.statistics import AttentionStatistics
from sglang_reasoncache.kernels import distance
from tests.eviction.rows import world_of
from tests.property.world import (
    PROMPT,
    Pair,
    Setup,
    World,
    abort,
    decode,
    finish,
    prefill,
    propose,
    respond,
    retract,
    start,
)
from tests.strict_device import WouldWait, guarded, no_wait, strict_device
from tests.triton_runs import INTERPRETED

SLOTS = 200
SETUPS = [Setup(page, 4, SLOTS, publish) for page in (1, 4) for publish in ("exact", "aliased")]
SETUPS += [Setup(page, 4, SLOTS, "aliased", need_sort=True) for page in (1, 4)]
ALL_SETUPS = pytest.mark.parametrize("setup", SETUPS, ids=str)
ALLOCATOR = [
    "alloc",
    "alloc_extend",
    "alloc_decode",
    "free_segment",
    "free_group_end",
    "evict",
    "release",
    "share",
]
TREE = [
    "checkpoint",
    "free_kv_row",
    "on_release",
    "match_prefix",
    "insert",
    "evict",
    "lock",
    "unlock",
]
CONTROLLER = ["after_decode", "after_prefill", "after_chunk", "on_release", "describe"]

pytestmark = [
    pytest.mark.usefixtures("published_config", "device"),
    pytest.mark.skipif(INTERPRETED, reason="runs without the interpreter"),
]


@pytest.fixture(params=["stand-in", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Worlds are on it, and what SGLang calls of ours must not wait."""
    made: list[World] = []
    plain = World.__init__

    def watched(world: World, *args: Any, **kwargs: Any) -> None:
        plain(world, *args, **kwargs)
        made.append(world)
        for owner, names in (
            (world.allocator, ALLOCATOR), (world.tree, TREE), (world.controller, CONTROLLER)
        ):  # fmt: skip
            guarded(owner, *(name for name in names if hasattr(owner, name)))

    monkeypatch.setattr(World, "device", "cuda")
    monkeypatch.setattr(World, "__init__", watched)
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with contextlib.ExitStack() as stack:
        if request.param == "stand-in":
            # Triton's interpreter needs a process of its own.
            monkeypatch.setattr(distance, "choose_backend", lambda *_: "torch")
            stack.enter_context(strict_device())
        yield
        for world in made:
            for req in [req for req in world.requests if req.kv.holds_kv]:
                finish(world, req)
            world.tree.evict(EvictParams(num_tokens=SLOTS))
            assert world.allocator.available_size() == SLOTS and not world.allocator.references


def steps(world: World, *reqs: Any, count: int = 4) -> None:
    for _ in range(count):
        for req in reqs:
            decode(world, req)
        world.controller.after_decode(list(reqs))


def shared(world: World, name: str = "r", first: int = 100) -> Any:
    """A request that shares two blocks, whose distances have arrived."""
    req = start(world, name, first)
    propose(world, req, Pair(20, 8), Pair(16, 12))
    steps(world, req)
    state: Any = world.controller.state_of(req)
    assert state.live_positions == 8
    return req


@ALL_SETUPS
@pytest.mark.parametrize("end", ["finish", "retract", "together", "opted out"])
def test_sharing_publishing_and_freeing(setup: Setup, end: str) -> None:
    world = World(setup)
    reqs = [shared(world), shared(world, "other", first=200)]
    if end == "together":
        world.allocator.free_group_begin()
    if end == "retract":
        retract(world, reqs[0])
        prefill(world, reqs[0])
        steps(world, reqs[0], count=6)
        assert world.controller.pipeline.saved == 16
    for req in reqs:
        finish(world, req)
    if end == "together":
        world.allocator.free_group_end()
    # A follow-up turn continues from what was published.
    text = [*reqs[1].origin_input_ids, *reqs[1].output_ids, 5]
    after = world.request("after", text, end == "opted out")
    prefill(world, after)
    after.output_ids.append(9)
    steps(world, after)
    assert world.controller.pipeline.saved == 0
    abort(world, after)
    assert world.tree.evict(EvictParams(num_tokens=20)).num_tokens_evicted >= 20


@ALL_SETUPS
def test_evicting(setup: Setup) -> None:
    world = World(setup)
    req = shared(world)
    # One that shares its slots, one that others share, one of its own.
    world.evictor.waiting["r"] = [Eviction(at, 4) for at in (20, 12, 24)]
    steps(world, req)
    assert world.controller.report.slots_saved == 8 + 4
    retract(world, req)
    prefill(world, req)
    steps(world, req, count=6)
    assert world.controller.eviction.positions_now == 12
    finish(world, req)


POLICIES: dict[str, Callable[..., Any]] = {
    "l2norm": L2Norm, "keydiff": KeyDiff, "h2o": H2O, "rkv": RKV
}  # fmt: skip


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_that_read_keys_and_weights(name: str, page: int) -> None:
    """They are asked again when the numbers have arrived, and answer as on the CPU."""
    policy = POLICIES[name](budget=16, slack=4, recent=4)

    def evicted() -> list[int]:
        world = world_of(Setup(page, 4, SLOTS, "exact"), policy)
        needs = StatisticsNeeds(latest=8, total=True)
        rows = world.rows.req_to_token
        statistics = AttentionStatistics(rows, world.rows.req_generation, needs)
        world.controller.eviction._weights = AttentionSource(statistics, heads=1)
        keys = torch.randn(world.pool.k_buffer[0].shape, generator=torch.Generator().manual_seed(1))
        for buffer in world.pool.k_buffer:
            buffer.copy_(keys)
        req = world.request("r", PROMPT)
        respond(world, req, [7] * 31)
        row, length = req.kv.req_pool_idx, req.kv.kv_allocated_len
        statistics.begin([row], [length - 4], [length - 4])
        statistics.begin([row], [length], [4])
        some = torch.rand(statistics._memory[row].shape, generator=torch.Generator().manual_seed(2))
        statistics._memory[row].copy_(some)
        steps(world, req, count=5)
        assert world.controller.eviction.positions_now > 0
        assert not world.controller.stats.eviction_refusals
        state: Any = world.controller.state_of(req)
        gone = np.flatnonzero(state.evicted._mask).tolist()
        finish(world, req)
        return gone

    found = evicted()
    with pytest.MonkeyPatch.context() as patch, torch._C.DisableTorchFunction():
        patch.setattr(World, "device", "cpu")
        expected = evicted()
    assert found == expected


def test_lists_and_arrays_are_uploaded() -> None:
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from numpy"):
        torch.tensor(np.arange(3), pin_memory=True)
    with no_wait():
        sent = [upload(values, "cuda", torch.int32) for values in ([3, 1], np.array([3, 1]))]
        assert all(one.is_cuda and one.dtype == torch.int32 for one in sent)
        with pytest.raises((WouldWait, RuntimeError)):
            sent[0].tolist()
    assert all(one.tolist() == [3, 1] for one in sent)


@dataclasses.dataclass(frozen=True)
class Reading:
    """Reads keys and answers ``answer`` of a request with more than 20 positions."""

    answer: tuple[Any, ...]
    when: float = 0.0
    needs = frozenset({KEYS})
    slack = 100

    def excess(self, written: int, slots: int) -> int:
        return max(slots - 20, 0)

    def evict(self, view: RequestView, excess: int) -> tuple[Any, ...]:
        view.keys.token_scores(lambda keys: keys[..., 0])
        return self.answer


def test_an_answer_that_waited_is_refused_like_any_other() -> None:
    wrong = Eviction(8, 10**12), Eviction("x", 3)  # type: ignore[arg-type]
    world = world_of(SETUPS[0], Reading((*wrong, Eviction(8, 8))))
    req = start(world)
    steps(world, req)
    assert world.controller.eviction.positions_now == 8
    assert world.controller.stats.eviction_refusals == {"not_written": 1, "malformed": 1}
    finish(world, req)


def test_nobody_gives_more_when_the_pool_is_not_short_any_more() -> None:
    """Both requests are asked before the first one's answer is there."""
    world = world_of(SETUPS[0], Reading((Eviction(8, 12),), when=0.25))
    reqs = [start(world, name, first) for name, first in (("a", 100), ("b", 200))]
    for _ in range(3):
        world.controller.after_decode(reqs)
    states: list[Any] = [world.controller.state_of(req) for req in reqs]
    assert sorted(state.evicted.count for state in states) == [0, 12]
    assert not any(state.asked for state in states)
    for req in reqs:
        finish(world, req)
