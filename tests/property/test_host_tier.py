# SPDX-License-Identifier: Apache-2.0
"""Random prefill passes over SGLang's hierarchical cache, which copies nodes of the prefix tree to the host and
loads them into other slots. Continuations stay in the pool: what shared never reaches the host.

Checks are those of ``test_scheduling.py``; host pools are SGLang's, copied by PyTorch code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis.stateful import invariant
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.pool_host import base, common, mha
from sglang.srt.runtime_context import get_context, get_server_args

from sglang_reasoncache.cache import continuations
from sglang_reasoncache.cache.continuation import Continued
from sglang_reasoncache.filter.process import FilterProcess
from tests.property.test_groups import RandomMeter
from tests.property.test_memory import explore
from tests.property.test_scheduling import SchedulingMachine, counted, machine_of
from tests.property.test_windows import WindowMachine
from tests.property.windows import WindowWorld
from tests.property.world import Setup, World
from tests.server.faulty.waiting_reasoncache import wait_for
from tests.server.host_tier.host_tier_reasoncache import copy

SETUPS = [
    ("write_back", Setup(page=1, block=3, slots=170, core="rust", continues=True, quotes=True)),
    *(
        pytest.param(*setup, marks=pytest.mark.long)
        for setup in (
            ("write_through", Setup(page=1, block=3, slots=170, continues=True)),
            ("write_back", Setup(page=4, block=4, slots=200, when="short", continues=True)),
        )
    ),
]
QUICK_OPERATIONS = 2_400


class TieredWorld(World):
    """A world whose host pool is as large as the pool, so that nodes are evicted from the host, too."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.tree.init_hicache(get_server_args(), self._params)
        # Only two tokens are needed to load a prefix.
        self.tree.load_back_threshold = 2

    def set_components(self, params: CacheInitParams) -> None:
        self._params = params


class TieredWindowWorld(TieredWorld, WindowWorld):
    """A world with a window pool, too, whose host pool is as large."""

    def set_components(self, params: CacheInitParams) -> None:
        WindowWorld.set_components(self, params)
        self._params = params


class TierMachine(SchedulingMachine):
    """A scheduler with a host tier. ``loaded``: passes that loaded prefixes. ``dropped``: passes after which a
    continuation was gone because its path had left the pool."""

    loaded = dropped = 0

    def _make_world(self, setup: Setup, **named: Any) -> World:
        return TieredWorld(setup, **named)

    def _pass(self, chunk: int, ratio: float, mixed: bool) -> list[Req] | None:
        self.settle()
        return super()._pass(chunk, ratio, mixed)

    def _compute(self, req: Req, slots: np.ndarray) -> None:
        type(self).loaded += self.world.tree.ready_to_load_host_cache() != -1
        super()._compute(req, slots)

    def settle(self) -> None:
        """What a scheduler does in each pass: take note of copies that are done."""
        self.world.tree.check_hicache_events()

    def evict(self, wanted: int) -> None:
        there = len(self.world.allocator.continuations)
        self.settle()
        super().evict(wanted)
        type(self).dropped += len(self.world.allocator.continuations) < there

    @invariant()
    def continuations_go_on_with_paths_in_the_pool(self) -> None:
        world = self.world
        for node in world.allocator.continuations:
            assert node.path is None or world.tree._is_cached(node.path.node)
        for req in self.holding():
            assert not (isinstance(req.last_node, Continued) and req.host_hit_length)

    def teardown(self) -> None:
        self.settle()
        super().teardown()
        self.world.tree.release_host_resources()


class TieredWindowMachine(TierMachine, WindowMachine):
    """A scheduler with both. A prefix that was loaded begins with the window that it had."""

    def _make_world(self, setup: Setup, **named: Any) -> WindowWorld:
        return TieredWindowWorld(setup, RandomMeter, **named)


@pytest.fixture
def host_tier(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's settings of a host tier, copied without a GPU."""
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: torch.cpu)
    monkeypatch.setattr(mha, "transfer_kv_direct", copy, raising=False)
    monkeypatch.setattr(common, "_cuda_host_register", lambda *_: None)
    monkeypatch.setattr(base, "host_memory_budget_bytes", lambda *_: 1 << 30)
    pinned = property(lambda _: False, lambda *_: None)
    monkeypatch.setattr(base.HostKVCache, "pin_memory", pinned, raising=False)
    with get_context().override_server_args(
        device="cpu",
        attention_backend="torch_native",
        enable_hierarchical_cache=True,
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_write_policy=request.param,
        hicache_ratio=1.0,
    ):
        yield


@pytest.mark.property
@pytest.mark.parametrize(("host_tier", "setup"), SETUPS, indirect=["host_tier"], ids=str)
def test_what_shared_stays_in_the_pool(
    setup: Setup, host_tier: None, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    with machine_of(TierMachine, setup) as machine:

        def all_seen() -> bool:
            return min(machine.continued, machine.loaded, machine.dropped, machine.aliased) > 0

        explore(machine, QUICK_OPERATIONS, len(SETUPS), rate=1, seen=all_seen)
    record_property("operations", machine.operations)
    print(setup, counted(machine, "continued", "loaded", "dropped"))
    assert all_seen()


@pytest.mark.long
@pytest.mark.property
@pytest.mark.parametrize("host_tier", ["write_through", "write_back"], indirect=True)
@pytest.mark.parametrize(
    "setup",
    [
        Setup(page=1, block=3, slots=190, core="rust", continues=True),
        Setup(page=4, block=3, slots=260, core="rust", continues=True, when="short"),
    ],
    ids=str,
)
def test_windows_come_back_with_their_prefixes(
    setup: Setup, host_tier: None, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(FilterProcess, "ready", wait_for)
    monkeypatch.setattr(continuations, "LEAST_TOKENS", 3)
    with machine_of(TieredWindowMachine, setup) as machine:

        def all_seen() -> bool:
            return min(machine.revived, machine.loaded, machine.taken) > 0

        explore(machine, QUICK_OPERATIONS // 3, 4, rate=1, seen=all_seen)
    record_property("operations", machine.operations)
    print(setup, counted(machine, "continued", "loaded", "dropped", "revived", "taken"))
    assert all_seen()
