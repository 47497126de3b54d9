# SPDX-License-Identifier: Apache-2.0
"""Tests that our code in decode and prefill steps never waits for the GPU and does nothing that CUDA forbids.

The code runs with SGLang's pools, allocators and prefix trees, on a stand-in for a GPU (``strict_device.py``)
and, if there is one, on a GPU. Only freeing slots whose numbers the host does not know may wait: in our
``free`` and ``free_page_ids``, and in SGLang's ``PagedTokenToKVPoolAllocator.free`` (``torch.unique``). SGLang
frees such slots only when a later allocation for the same batch failed; our code passes none."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.eviction.policies.h2o import H2O
from sglang_reasoncache.eviction.policies.keydiff import KeyDiff
from sglang_reasoncache.eviction.policies.l2norm import L2Norm
from sglang_reasoncache.eviction.policies.rkv import RKV
from sglang_reasoncache.eviction.recent_queries import LayerShape, RecentQueries
from sglang_reasoncache.kernels import distance
from tests.eviction.rows import steps, world_of
from tests.property.world import LAYERS, MAX_ROWS, PROMPT, Eviction, Pair, Setup, World
from tests.strict_device import WouldWait, guarded, no_wait, strict_device
from tests.triton_runs import INTERPRETED

SLOTS = 200
SETUPS = [Setup(page, 4, SLOTS, need_sort) for page in (1, 4) for need_sort in (False, True)]
ALL_SETUPS = pytest.mark.parametrize("setup", SETUPS, ids=str)


def called_by_sglang(owner: Any) -> set[str]:
    """Names of the public methods that ``owner`` has from our classes, except ``free``, which may wait."""
    ours = [cls for cls in type(owner).__mro__ if cls.__module__.startswith("sglang_reasoncache.")]
    found = [item for cls in ours for item in vars(cls).items() if inspect.isfunction(item[1])]
    return {name for name, _ in found if name[0] != "_"} - {"free"}


pytestmark = [
    pytest.mark.usefixtures("published_config", "device"),
    pytest.mark.skipif(INTERPRETED, reason="runs without the interpreter"),
]


@pytest.fixture(params=["stand-in", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes each ``World`` use the stand-in or the GPU. Our methods that SGLang calls raise if they wait."""
    made: list[World] = []
    plain = World.__init__

    def watched(world: World, *args: Any, **kwargs: Any) -> None:
        plain(world, *args, **kwargs)
        made.append(world)
        for owner in (world.allocator, world.tree, world.controller):
            guarded(owner, *called_by_sglang(owner))

    monkeypatch.setattr(World, "device", "cuda")
    monkeypatch.setattr(World, "__init__", watched)
    if request.param == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    with contextlib.ExitStack() as stack:
        if request.param == "stand-in":
            # Let PyTorch compute the distances, because Triton's interpreter would need a separate process.
            monkeypatch.setattr(distance, "BACKENDS", {})
            stack.enter_context(strict_device())
        yield
        for world in made:
            for req in [req for req in world.requests if req.kv.holds_kv]:
                world.finish(req)
            world.tree.evict(EvictParams(num_tokens=SLOTS))
            assert world.allocator.available_size() == SLOTS and not world.allocator.references


def shared(world: World, name: str = "r", first: int = 100) -> Any:
    """Starts a request, and runs decode steps until two of its blocks share."""
    req = world.start(name, first)
    world.propose(req, Pair(20, 8), Pair(16, 12))
    steps(world, req, count=4)
    assert world.allocator.row_of(req.kv.req_pool_idx).saved == 8
    return req


@ALL_SETUPS
@pytest.mark.parametrize("end", ["finish", "retract", "together"])
def test_sharing_publishing_and_freeing(setup: Setup, end: str) -> None:
    world = World(setup)
    reqs = [shared(world), shared(world, "other", first=200)]
    if end == "together":
        world.allocator.free_group_begin()
    if end == "retract":
        world.retract(reqs[0])
        world.prefill(reqs[0])
        steps(world, reqs[0], count=6)
        assert world.controller.pipeline.saved == 16
    for req in reqs:
        world.finish(req)
    if end == "together":
        world.allocator.free_group_end()
    # The prompt of a follow-up turn begins with the prefix that the finished request published.
    text = [*reqs[1].origin_input_ids, *reqs[1].output_ids, 5]
    after = world.request("after", text)
    world.prefill(after)
    after.output_ids.append(9)
    steps(world, after, count=4)
    assert world.controller.pipeline.saved == 0
    world.abort(after)
    assert world.tree.evict(EvictParams(num_tokens=20)).num_tokens_evicted >= 20


@ALL_SETUPS
def test_evicting(setup: Setup) -> None:
    world = World(setup)
    req = shared(world)
    # Of the named positions, 20 to 23 read the slots of 8 to 11, 12 to 15 are read by others, which stay, and
    # 24 to 27 neither.
    world.evictor.waiting["r"] = [Eviction(at, 4) for at in (8, 20, 12, 24)]
    steps(world, req, count=4)
    assert world.controller.report.slots_saved == 8 + 8
    world.retract(req)
    world.prefill(req)
    steps(world, req, count=6)
    # Positions that name the same slots are evicted only together.
    assert world.controller.eviction.positions_now == 12
    world.finish(req)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kind", [L2Norm, KeyDiff, H2O, RKV])
def test_policies_that_read_keys_and_queries(kind: Any, page: int) -> None:
    """On the device, scores arrive only at a later poll. The policy evicts the same positions as on the CPU."""
    policy = kind(budget=16, slack=4, recent=4)

    def evicted() -> list[int]:
        shapes = {layer: LayerShape(2, 4, 0.5, 0.0) for layer in range(LAYERS)}
        generations = torch.zeros(MAX_ROWS + 1, dtype=torch.int64)
        recent = RecentQueries(shapes, generations, 32, torch.float32, torch.device(World.device))
        world = world_of(Setup(page, 4, SLOTS), policy, queries=recent)
        keys = torch.randn(world.pool.k_buffer[0].shape, generator=torch.Generator().manual_seed(1))
        for buffer in world.pool.k_buffer:
            buffer.copy_(keys)
        req = world.request("r", PROMPT)
        world.respond(req, [7] * 31)
        row = req.kv.req_pool_idx
        length = req.kv.kv_allocated_len
        queries = torch.randn(length, 8, generator=torch.Generator().manual_seed(2))
        rows = torch.tensor([row]).to(World.device)
        recent.begin_extend(rows, torch.arange(length).to(World.device), [length])
        for layer in range(LAYERS):
            recent.keep(layer, queries.to(World.device))
        steps(world, req, count=5)
        assert world.controller.eviction.positions_now > 0
        gone = world.allocator.row_of(row).evicted_from(0).tolist()
        world.finish(req)
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
