# SPDX-License-Identifier: Apache-2.0
"""Weights that positions got: kept by row and position, told by backend and scheduler side."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_reasoncache.attention import statistics
from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
from sglang_reasoncache.attention.statistics import AttentionStatistics
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.kernels.plan import RowPlan, plan_rows
from sglang_reasoncache.plugin import assembly
from sglang_reasoncache.policies.contract import ATTENTION, Observation
from sglang_reasoncache.policies.evictor import Evictor
from sglang_reasoncache.policies.registry import NamedPolicy
from sglang_reasoncache.sharing.weights import WeightSource, observation_of
from tests.unit.attention_rig import LENGTHS, Rig, served_runner

ROWS, WIDTH, SLOTS = 5, 90, 600
WANTED = Observation(latest=4, total=True, prompt=6)


class World:
    """Rows that are built, grow, get holes and are built anew, and all weights ever given."""

    def __init__(self, seed: int, wanted: Observation) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(-1, SLOTS, (ROWS, WIDTH), dtype=torch.int32)
        self.wanted = wanted
        #: Of each row, how many requests got it.
        self.generations = torch.zeros(ROWS, dtype=torch.int64)
        self.statistics = AttentionStatistics(self.rows, self.generations, wanted)
        self.length = [0] * ROWS
        #: Rows of requests some of whose positions were computed.
        self.begun: set[int] = set()
        #: Of each row: query position -> weights of the positions it saw.
        self.given: list[dict[int, torch.Tensor]] = [{} for _ in range(ROWS)]

    def forward(self, requests: list[int], new: list[int] | None) -> None:
        counts = new or [1] * len(requests)
        for row, count in zip(requests, counts, strict=True):
            self.length[row] += count
            at = slice(self.length[row] - count, self.length[row])
            self.rows[row, at] = torch.randint(0, SLOTS, (count,), dtype=torch.int32)
        lengths = torch.tensor([self.length[row] for row in requests])
        plan = plan_rows(self.rows, torch.tensor(requests), lengths, num_slots=SLOTS)
        indices = torch.tensor(requests)
        observed = self.statistics.observe(plan, indices, lengths, new)
        # As SGLang does with its own.
        lengths += 1
        indices.zero_()
        expected = []
        for row, count in zip(requests, counts, strict=True):
            told = 1 if new is None else min(count, self.wanted.prompt)
            if row in self.begun and count == 1:
                told = 1
            self.begun.add(row)
            for query in range(self.length[row] - told, self.length[row]):
                weights = torch.rand(query + 1, generator=self.torch)
                weights[self.rows[row, : query + 1] < 0] = 0
                self.given[row][query] = weights
                expected.append(weights[self.rows[row, : query + 1] >= 0])
        if observed is None:
            assert not expected
            return
        # As two layers do.
        observed.weights += torch.cat(expected) / 4
        observed.weights += torch.cat(expected) * 3 / 4

    def step(self) -> None:
        kind = self.random.random()
        if kind < 0.2:  # a request begins, with some of its prompt from the prefix cache
            row = self.random.randrange(ROWS)
            self.begin(row, self.random.choice([self.random.randrange(0, 20), self.length[row]]))
        elif kind < 0.3:  # the next chunk of a long prompt: what came before is forgotten
            row = self.random.randrange(ROWS)
            if 0 < self.length[row] < WIDTH - 20:
                count = self.random.choice([2, 6, 7, 15])
                if count > self.wanted.prompt:
                    self.given[row].clear()
                self.forward([row], [count])
        elif kind < 0.4:  # holes
            row = self.random.randrange(ROWS)
            if self.length[row] > 4:
                start = self.random.randrange(self.length[row] - 2)
                self.rows[row, start : start + 2] = -1
        else:
            some = [r for r in range(ROWS) if 0 < self.length[r] < WIDTH]
            some = self.random.sample(some, self.random.randint(0, len(some)))
            if some:
                mixed = self.random.random() < 0.2
                self.forward(some, [1] * len(some) if mixed else None)

    def begin(self, row: int, cached: int) -> None:
        """Another request gets the row and finds its first ``cached`` positions computed."""
        self.given[row].clear()
        self.begun.discard(row)
        self.generations[row] += 1
        self.length[row] = min(cached, WIDTH - 40)
        self.rows[row, : self.length[row]] = 7
        self.forward([row], [self.random.randrange(1, 20)])

    def check(self, row: int) -> None:
        length = self.length[row]
        held = (self.rows[row, :length] >= 0).nonzero()[:, 0]
        queries = sorted(self.given[row])
        padded = [
            torch.nn.functional.pad(self.given[row][q], (0, length - q - 1))[held].double()
            for q in queries
        ]
        if self.wanted.total:
            found = self.statistics.total(row, held)
            torch.testing.assert_close(found, sum(padded), rtol=1e-5, atol=1e-6)
        for newest in range(1, self.wanted.latest + 1):
            some = padded[-newest:]
            found = self.statistics.latest(row, held, newest)
            torch.testing.assert_close(found, sum(some) / len(some), rtol=1e-5, atol=1e-6)


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
    world = World(seed, wanted)
    checked = 0
    for _ in range(150):
        world.step()
        row = world.random.randrange(ROWS)
        if world.given[row]:
            world.check(row)
            checked += 1
    assert checked > 50


def test_nothing_of_the_last_request_in_a_row_is_left() -> None:
    """The next one finds as many positions in the prefix cache as the last one had reached."""
    world = World(1, WANTED)
    world.begin(2, 0)
    for _ in range(5):
        world.forward([2], None)
    world.begin(2, world.length[2])
    world.check(2)
    # Before its first forward: nothing at all.
    world.generations[2] += 1
    held = torch.arange(4)
    assert world.statistics.total(2, held).tolist() == [0] * 4
    assert world.statistics.latest(2, held, 1).tolist() == [0] * 4


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
        assembly.attention_backend(runner, config, "any", lambda _runner: Large())


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


def dense_weights(rig: Rig, batch: Any, observed: int) -> list[torch.Tensor]:
    """fp64 sums over heads and the last ``observed`` queries of each row, by position."""
    keys = rig.pool.k_buffer[1].double()
    found, query = [], iter(rig.query.double().split(batch.extend_seq_lens.tolist()))
    for row, length in zip(rig.row_of.tolist(), rig.lengths, strict=True):
        k = keys[rig.rows.req_to_token[row, :length].long()].repeat_interleave(
            rig.heads // rig.kv_heads, dim=1
        )
        q = next(query)[-observed:]
        logits = torch.einsum("qhd,nhd->hqn", q, k) * rig.layer.scaling
        behind = torch.arange(length) > torch.arange(length - len(q), length)[:, None]
        found.append(logits.masked_fill(behind, float("-inf")).softmax(-1).sum(dim=(0, 1)))
    return found


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
    rig = Rig(moved=0.0, heads=6)
    batch = rig.batch(new)
    decode = batch.forward_mode.is_decode()
    backend = PagedCpuBackend(served_runner(rig), corrected=True)
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
