# SPDX-License-Identifier: Apache-2.0
"""Weights that positions got: kept by row and position, told by backend and scheduler side."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction import statistics
from sglang_reasoncache.eviction.policies.contract import ATTENTION, NamedPolicy, Observation
from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.eviction.statistics import AttentionStatistics
from sglang_reasoncache.eviction.weights import WeightSource, observation_of
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.plugin import attention
from tests.eviction.statistics_world import (
    WANTED,
    World,
    assert_nothing_is_left,
    assert_sums,
    dense_weights,
)
from tests.unit.attention_rig import LENGTHS, Rig, supported_runner


@pytest.fixture
def memory_is_not_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = statistics.allocated
    monkeypatch.setattr(statistics, "allocated", lambda *shape: plain(*shape).fill_(float("nan")))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "wanted",
    [
        WANTED,
        Observation(latest=8, prompt=2),
        Observation(total=True, prompt=6),
        Observation(latest=4, total=True),
    ],
    ids=str,
)
def test_sums_are_those_of_all_weights_given(
    seed: int, wanted: Observation, memory_is_not_clear: None
) -> None:
    assert_sums(World(seed, wanted), steps=150, least=50)


def test_nothing_of_the_last_request_in_a_row_is_left() -> None:
    assert_nothing_is_left(World(1, WANTED))


def test_a_batch_with_prompts_keeps_totals_of_those_that_decode() -> None:
    world = World(1, Observation(total=True))
    for row in (1, 3):
        world.begin(row, 0)
    world.forward([1], None)
    world.forward([1], None)
    world.forward([3, 1], [5, 1])
    assert len(world.given[1]) == 3
    world.check(1)


def test_memory_is_that_of_the_requests_and_not_of_every_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    plain = statistics.allocated

    def counted(*shape: int) -> torch.Tensor:
        found = plain(*shape)
        asked.append(found.numel())
        return found

    monkeypatch.setattr(statistics, "allocated", counted)
    rows = torch.zeros(1, dtype=torch.int32).expand(2049, 131_076)
    found = AttentionStatistics(
        rows, torch.zeros(2049, dtype=torch.int64), Observation(latest=32, total=True, prompt=2)
    )
    assert max(asked) == 33 * 131_076, "whether one request of the whole context has room"
    asked.clear()
    requests, lengths = torch.tensor([7, 9]), torch.tensor([1000, 30])
    plan = RowPlan(torch.tensor([0, 1000, 1030]).int(), torch.zeros(1030).int(), None)
    assert found.observe(plan, requests, lengths, [1000, 30]) is not None
    assert sum(asked) < 2 * 33 * 1030 + 2 * 32 * 33


def test_no_memory_is_an_error_of_its_own() -> None:
    rows = torch.zeros(1, dtype=torch.int32).expand(2, 1 << 55)
    with pytest.raises(MemoryError, match="bytes for attention statistics of a request"):
        AttentionStatistics(rows, torch.zeros(2, dtype=torch.int64), WANTED)


def test_no_memory_ends_the_start_by_name() -> None:
    class Large:
        def observe(self, wanted: Observation) -> AttentionStatistics:
            rows = torch.zeros(1, dtype=torch.int32).expand(2, 1 << 55)
            return AttentionStatistics(rows, torch.zeros(2, dtype=torch.int64), wanted)

    runner = SimpleNamespace(
        is_draft_worker=False,
        prefill_attention_backend_str="any",
        decode_attention_backend_str="any",
        token_to_kv_pool_allocator=SimpleNamespace(),
    )
    config = ReasonCacheConfig(policy="snapkv:budget=64:window=48", positions="as-cached")
    with pytest.raises(ValueError, match=r"--reasoncache-policy snapkv.* newest 48 queries"):
        attention.attention_backend(
            runner, config, "any", lambda _runner: Large(), CachedPositions(1, "cpu")
        )


def test_only_what_was_announced_can_be_read() -> None:
    latest = AttentionStatistics(
        torch.zeros(2, 8, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        Observation(latest=3),
    )
    with pytest.raises(LookupError):
        latest.total(0, torch.tensor([0]))
    for queries in (0, 4):
        with pytest.raises(LookupError, match=f"latest {queries} queries"):
            latest.latest(0, torch.tensor([0]), queries)
    # Nothing was observed yet.
    assert latest.latest(0, torch.tensor([0, 1]), 3).tolist() == [0, 0]


@pytest.mark.parametrize("entries", [1, 700, 1 << 19])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300], [1, 3, 4]], ids=str)
def test_backend_notes_weights_and_computes_the_same(
    new: list[int],
    entries: int,
    monkeypatch: pytest.MonkeyPatch,
    published_config: None,
    out_of_tree_platform: None,
) -> None:
    monkeypatch.setattr(statistics, "_ENTRIES", entries)
    rig = Rig(shifted=0.0, heads=6)
    batch = rig.batch(new)
    decode = batch.forward_mode.is_decode()
    backend = PagedCpuBackend(supported_runner(rig), rig.cached_at)
    plain = rig.forward(backend, batch, decode)
    noted = backend.observe(Observation(latest=5, total=True, prompt=5))
    assert torch.equal(rig.forward(backend, batch, decode), plain)
    expected = dense_weights(rig, batch, 5)
    for row, length, count, right in zip(rig.row_of.tolist(), LENGTHS, new, expected, strict=True):
        held = torch.arange(length)
        queries = min(count, 5)
        if not decode:
            total = noted.total(row, held)
            torch.testing.assert_close(total, right, rtol=1e-4, atol=1e-6)
        latest = noted.latest(row, held, 5 if not decode else 1) * queries
        torch.testing.assert_close(latest, right, rtol=1e-4, atol=1e-6)


class Reader(Evictor):
    """Says what it is told to read."""

    def __init__(self, needs: set[str], observes: Observation) -> None:
        super().__init__(budget=1)
        object.__setattr__(self, "_needs", frozenset(needs))
        object.__setattr__(self, "observes", observes)

    @property
    def needs(self) -> frozenset[str]:
        return self._needs  # type: ignore[attr-defined, no-any-return]


def test_all_policies_get_what_they_announce() -> None:
    def named(*policies: Reader) -> list[NamedPolicy]:
        return [NamedPolicy(str(i), policy) for i, policy in enumerate(policies)]  # type: ignore[arg-type]

    assert observation_of([]) is None
    assert observation_of(named(Reader(set(), WANTED))) is None
    both = named(
        Reader({ATTENTION}, Observation(latest=8, prompt=8)),
        Reader({ATTENTION}, Observation(total=True, prompt=3)),
    )
    assert observation_of(both) == Observation(latest=8, total=True, prompt=8)


def test_weights_are_averaged_over_heads() -> None:
    world = World(1, WANTED)
    world.forward([2], [5])
    world.forward([2], None)
    held = np.array([0, 2, 5])
    found = WeightSource(world.statistics, heads=24).of(2, held)
    by_hand: list[torch.Tensor] = [
        torch.nn.functional.pad(w, (0, 5 - q)) for q, w in world.given[2].items()
    ]
    np.testing.assert_allclose(
        found.total(), (torch.stack(by_hand).sum(dim=0) / 24)[held].numpy(), rtol=1e-6
    )
    np.testing.assert_allclose(found.latest(1), (by_hand[-1] / 24)[held].numpy(), rtol=1e-6)
