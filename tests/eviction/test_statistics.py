# SPDX-License-Identifier: Apache-2.0
"""Attention statistics in host memory: by row and position, for policies and from the backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction import host_statistics
from sglang_reasoncache.eviction.attention import AttentionSource, needs_of
from sglang_reasoncache.eviction.host_statistics import HostStatistics
from sglang_reasoncache.eviction.policies.contract import (
    ATTENTION,
    NamedPolicy,
    StatisticsNeeds,
)
from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.eviction.statistics import AttentionStatistics
from sglang_reasoncache.plugin import attention
from tests.eviction.statistics_world import (
    WANTED,
    World,
    assert_no_memory_is_an_error,
    assert_nothing_is_left,
    assert_only_announced,
    assert_sums,
    assert_works_without_memory,
    dense_weights,
    spoil_memory,
)
from tests.unit.attention_rig import LENGTHS, Rig, supported_runner


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "wanted",
    [
        WANTED,
        StatisticsNeeds(latest=8, prompt=2),
        StatisticsNeeds(total=True, prompt=6),
        StatisticsNeeds(latest=4, total=True),
    ],
    ids=str,
)
def test_sums_are_those_of_all_weights_given(
    seed: int, wanted: StatisticsNeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_memory(monkeypatch)
    assert_sums(World(seed, wanted), steps=150, least=50)


def test_nothing_of_the_last_request_in_a_row_is_left() -> None:
    assert_nothing_is_left(World(1, WANTED))


def test_without_memory_positions_count_as_never_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert_works_without_memory(World(1, WANTED), monkeypatch, caplog)


def test_no_memory_at_the_start_is_an_error() -> None:
    assert_no_memory_is_an_error(HostStatistics)


def test_only_what_was_announced_can_be_read() -> None:
    assert_only_announced(HostStatistics)


def test_a_batch_with_prompts_keeps_totals_of_those_that_decode() -> None:
    world = World(1, StatisticsNeeds(total=True))
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
    taken: list[int] = []
    plain = AttentionStatistics._allocated

    def counted(self: AttentionStatistics, size: int) -> torch.Tensor | None:
        found = plain(self, size)
        taken.append(0 if found is None else found.numel())
        return found

    monkeypatch.setattr(AttentionStatistics, "_allocated", counted)
    rows = torch.zeros(1, dtype=torch.int32).expand(2049, 131_076)
    needs = StatisticsNeeds(latest=32, total=True, prompt=2)
    found = HostStatistics(rows, torch.zeros(2049, dtype=torch.int64), needs)
    assert max(taken) == 33 * 131_076, "whether one request of the whole context has memory"
    taken.clear()
    assert found.begin([7, 9], [1000, 30], [1000, 30]) is not None
    assert sum(taken) < 2 * 33 * 1030 + 2 * 32 * 33


def test_no_memory_ends_the_start_by_name() -> None:
    class Large:
        skips_evicted = True
        rotation = None

        @property
        def paged(self) -> Any:
            return self

        def keep_statistics(self, needs: StatisticsNeeds) -> AttentionStatistics:
            rows = torch.zeros(1, dtype=torch.int32).expand(2, 1 << 55)
            return HostStatistics(rows, torch.zeros(2, dtype=torch.int64), needs)

    runner: Any = SimpleNamespace(
        is_draft_worker=False,
        prefill_attention_backend_str="any",
        decode_attention_backend_str="any",
    )
    config = ReasonCacheConfig(policy="snapkv:budget=64:window=48", positions="as-cached")
    cached = CachedPositions(1, "cpu")
    with pytest.raises(ValueError, match=r"--reasoncache-policy snapkv.* newest 48 queries"):
        attention.attention_backend(runner, config, "any", lambda _runner: Large(), cached)


@pytest.mark.parametrize("entries", [1, 700, 1 << 19])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300], [1, 3, 4]], ids=str)
def test_backend_gives_weights_and_computes_the_same(
    new: list[int],
    entries: int,
    monkeypatch: pytest.MonkeyPatch,
    published_config: None,
    out_of_tree_platform: None,
) -> None:
    monkeypatch.setattr(host_statistics, "_ENTRIES", entries)
    rig = Rig(shifted=0.0, heads=6)
    batch = rig.batch(new)
    decode = batch.forward_mode.is_decode()
    backend = PagedCpuBackend(supported_runner(rig), rig.cached_at)
    plain = rig.forward(backend, batch)
    found = backend.paged.keep_statistics(StatisticsNeeds(latest=5, total=True, prompt=5))
    before = [length - 1 for length in rig.lengths]
    if decode:
        # A request is known from its prefill on.
        found.begin(rig.row_of, before, before)
    assert torch.equal(rig.forward(backend, batch), plain)
    expected = dense_weights(rig, batch, 5)
    for row, length, count, right in zip(rig.row_of.tolist(), LENGTHS, new, expected, strict=True):
        held = torch.arange(length)
        queries = min(count, 5)
        if not decode:
            total = found.total(row, held)
            torch.testing.assert_close(total, right, rtol=1e-4, atol=1e-6)
        latest = found.latest(row, held, 5 if not decode else 1) * queries
        torch.testing.assert_close(latest, right, rtol=1e-4, atol=1e-6)


class Reader(Evictor):
    """Says what it is told to read."""

    def __init__(self, needs: set[str], statistics_needs: StatisticsNeeds) -> None:
        super().__init__(budget=1)
        object.__setattr__(self, "_needs", frozenset(needs))
        object.__setattr__(self, "statistics_needs", statistics_needs)

    @property
    def needs(self) -> frozenset[str]:
        return self._needs  # type: ignore[attr-defined, no-any-return]


def test_all_policies_get_what_they_announce() -> None:
    def named(*policies: Reader) -> list[NamedPolicy]:
        return [NamedPolicy(str(i), policy) for i, policy in enumerate(policies)]  # type: ignore[arg-type]

    assert needs_of([]) is None
    assert needs_of(named(Reader(set(), WANTED))) is None
    both = named(
        Reader({ATTENTION}, StatisticsNeeds(latest=8, prompt=8)),
        Reader({ATTENTION}, StatisticsNeeds(total=True, prompt=3)),
    )
    assert needs_of(both) == StatisticsNeeds(latest=8, total=True, prompt=8)


def test_weights_are_averaged_over_heads() -> None:
    world = World(1, WANTED)
    world.forward([2], [5])
    world.forward([2], None)
    held = np.array([0, 2, 5])
    found = AttentionSource(world.statistics, heads=24).of(2, held)
    by_hand: list[torch.Tensor] = [
        torch.nn.functional.pad(w, (0, 5 - q)) for q, w in world.given[2].items()
    ]
    np.testing.assert_allclose(
        found.total(), (torch.stack(by_hand).sum(dim=0) / 24)[held].numpy(), rtol=1e-6
    )
    np.testing.assert_allclose(found.latest(1), (by_hand[-1] / 24)[held].numpy(), rtol=1e-6)
