# SPDX-License-Identifier: Apache-2.0
"""Attention statistics by row and position: in host memory, and on a device under Triton's
interpreter. What both must do is tested once, for the one that this process runs."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
from sglang_reasoncache.attention.paged_cuda import SHIFTED
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction import statistics
from sglang_reasoncache.eviction.device_statistics import DeviceStatistics
from sglang_reasoncache.eviction.held import AttentionSource, HeldAttention
from sglang_reasoncache.eviction.policies.contract import (
    ATTENTION,
    NamedPolicy,
    StatisticsNeeds,
    needs_of,
)
from sglang_reasoncache.eviction.statistics import AttentionStatistics
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into
from sglang_reasoncache.kernels.row_plan import BatchRows
from sglang_reasoncache.plugin import attention
from tests.triton_runs import INTERPRETED, under_interpreter
from tests.triton_runs import small_launches as small_launches
from tests.triton_runs import test_interpreted as test_interpreted
from tests.unit.attention_rig import LENGTHS, Rig, announced, mark
from tests.unit.test_attention_cuda_graph import LENGTHS as SHORT
from tests.unit.test_attention_cuda_graph import Graphs, triton_backend
from tests.unit.test_attention_cuda_graph import ranks as ranks

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")
on_host = pytest.mark.skipif(INTERPRETED, reason="runs without the interpreter")

ROWS, WIDTH, SLOTS = 5, 90, 600
WANTED = StatisticsNeeds(latest=4, total=True, prompt=6)
#: What this process tests.
KIND: type[AttentionStatistics] = DeviceStatistics if INTERPRETED else AttentionStatistics


class World:
    """Rows that are built, grow, get evicted positions and are built anew, and all weights given."""

    def __init__(self, seed: int, wanted: StatisticsNeeds) -> None:
        self.random = random.Random(seed)
        self.torch = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(-1, SLOTS, (ROWS, WIDTH), dtype=torch.int32)
        self.wanted = wanted
        #: Of each row, how many requests got it.
        self.generations = torch.zeros(ROWS, dtype=torch.int64)
        self.statistics: Any = KIND(self.rows, self.generations, wanted)
        #: Of decode steps on a device, in buffers that stay.
        self.weights = torch.zeros(8 * WIDTH) if INTERPRETED else None
        self.buffers = PlanBuffers.of(8, 8 * WIDTH, "cpu", positions=True)
        self.length = [0] * ROWS
        #: Rows of requests some of whose positions were computed.
        self.begun: set[int] = set()
        #: Of each row: query position -> weights of the positions it saw.
        self.given: list[dict[int, torch.Tensor]] = [{} for _ in range(ROWS)]

    def planned(self, requests: torch.Tensor, lengths: torch.Tensor, decodes: bool) -> BatchRows:
        """What a forward reads."""
        if not INTERPRETED:
            plan = plan_rows(self.rows, requests, lengths, num_slots=SLOTS)
            return BatchRows(plan, requests, lengths, int(lengths.max()))
        plan_into(self.buffers, self.rows, requests, lengths, num_slots=SLOTS)
        if not decodes:
            return BatchRows(self.buffers, requests, lengths, int(lengths.max()))
        # As in a graph: SGLang's buffers, written anew before each replay.
        return BatchRows(self.buffers, requests.clone(), lengths.clone(), WIDTH)

    def forward(self, requests: list[int], new: list[int] | None) -> None:
        counts = new or [1] * len(requests)
        for row, count in zip(requests, counts, strict=True):
            self.length[row] += count
            at = slice(self.length[row] - count, self.length[row])
            self.rows[row, at] = torch.randint(0, SLOTS, (count,), dtype=torch.int32)
        lengths = torch.tensor([self.length[row] for row in requests])
        indices = torch.tensor(requests)
        prefill = self.statistics.begin(indices.tolist(), lengths.tolist(), new)
        read = self.planned(indices, lengths, prefill is None)
        if prefill is None:
            update = self.statistics.decode(read, self.weights)
        else:
            update = self.statistics.prefill(read, prefill)
            for _, (begin, end), part in update.parts:
                assert len(part) >= (end - begin).sum()
                assert not len(begin) or (end - begin).max() <= update.longest
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
        found = torch.cat([torch.zeros(0), *expected])
        # As two layers do.
        update.weights[: len(found)] += found / 4
        update.weights[: len(found)] += found * 3 / 4
        update.apply()
        assert not update.weights.any(), "ready for the next step"

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
        elif kind < 0.4:  # evicted positions
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
        padded = [
            torch.nn.functional.pad(weights, (0, length - query - 1))[held].double()
            for query, weights in sorted(self.given[row].items())
        ]
        if self.wanted.total:
            found = self.statistics.total(row, held)
            torch.testing.assert_close(found, sum(padded), rtol=1e-5, atol=1e-6)
        for newest in range(1, self.wanted.latest + 1):
            some = padded[-newest:]
            found = self.statistics.latest(row, held, newest)
            torch.testing.assert_close(found, sum(some) / len(some), rtol=1e-5, atol=1e-6)


def dense_weights(rig: Rig, batch: Any, queries: int) -> list[torch.Tensor]:
    """fp64 sums over heads and the last ``queries`` of each row, by position."""
    return [weights[:, -queries:].sum(dim=(0, 1)) for _, weights in rig.dense(batch)]


# -- on a host and on a device ---------------------------------------------------


@pytest.mark.parametrize("seed", range(1 if INTERPRETED else 6))
@pytest.mark.parametrize(
    "wanted",
    [
        WANTED,
        StatisticsNeeds(latest=8, prompt=2),
        StatisticsNeeds(total=True, prompt=6),
        StatisticsNeeds(latest=3 if INTERPRETED else 4, total=True),
    ],
    ids=str,
)
def test_sums_are_those_of_all_weights_given(
    seed: int, wanted: StatisticsNeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens. New memory holds NaN, and rows outgrow it soon."""
    plain = AttentionStatistics._allocated

    def spoiled(self: AttentionStatistics, size: int) -> torch.Tensor | None:
        found = plain(self, size)
        return None if found is None else found.fill_(float("nan"))

    monkeypatch.setattr(AttentionStatistics, "_allocated", spoiled)
    monkeypatch.setattr(statistics, "_LEAST", 4)
    world, checked = World(seed, wanted), 0
    for _ in range(80 if INTERPRETED else 150):
        world.step()
        row = world.random.randrange(ROWS)
        if world.given[row]:
            world.check(row)
            checked += 1
    assert checked > (20 if INTERPRETED else 50)


def test_nothing_of_the_last_request_in_a_row_is_left() -> None:
    """The next one finds as many positions cached as the last one had reached."""
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


def test_without_memory_positions_count_as_never_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only until another request gets the row."""
    world = World(1, WANTED)
    world.begin(2, 0)
    real = torch.empty

    def none_left(shape: Any, *sizes: Any, **options: Any) -> torch.Tensor:
        if isinstance(shape, tuple):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(shape, *sizes, **options)

    with monkeypatch.context() as patch:
        patch.setattr(statistics.torch, "empty", none_left)
        # Its memory has to grow for its next position.
        world.statistics._capacity[2] = 0
        for row in (2, 3):
            world.forward([row], [3])
            world.forward([row], None)
            assert world.statistics.total(row, torch.arange(3)).tolist() == [0] * 3
            assert world.statistics.latest(row, torch.arange(3), 2).tolist() == [0] * 3
    assert caplog.text.count("no memory for attention statistics") == 1
    world.begin(2, 0)
    world.check(2)


def test_no_memory_at_the_start_ends_it_by_name() -> None:
    def without_memory(needs: StatisticsNeeds) -> AttentionStatistics:
        rows = torch.zeros(1, dtype=torch.int32).expand(2, 1 << 55)
        return KIND(rows, torch.zeros(2, dtype=torch.int64), needs)

    with pytest.raises(MemoryError, match="bytes for attention statistics of a request"):
        without_memory(WANTED)
    large = SimpleNamespace(rotation=None, keep_statistics=without_memory)
    backend = SimpleNamespace(paged=large, skips_evicted=True)
    names = dict.fromkeys(("prefill_attention_backend_str", "decode_attention_backend_str"), "any")
    runner: Any = SimpleNamespace(is_draft_worker=False, **names)
    config = ReasonCacheConfig(policy="snapkv:budget=64:window=48", positions="as-cached")
    cached = CachedPositions(1, "cpu")
    with pytest.raises(ValueError, match=r"--reasoncache-policy snapkv.* newest 48 queries"):
        attention.attention_backend(runner, config, "any", lambda _runner: backend, cached)


def test_only_what_was_announced_can_be_read() -> None:
    """Nothing was given yet."""
    found = KIND(torch.zeros(2, 8).int(), torch.zeros(2).long(), StatisticsNeeds(latest=3))
    with pytest.raises(LookupError):
        found.total(0, np.array([0]))
    for queries in (0, 4):
        with pytest.raises(LookupError, match=f"latest {queries} queries"):
            found.latest(0, np.array([0]), queries)
    assert found.latest(0, np.array([0, 1]), 3).tolist() == [0, 0]


# -- in host memory ----------------------------------------------------------------


@on_host
def test_a_batch_with_prompts_keeps_totals_of_those_that_decode() -> None:
    world = World(1, StatisticsNeeds(total=True))
    for row in (1, 3):
        world.begin(row, 0)
    for some, new in (([1], None), ([1], None), ([3, 1], [5, 1])):
        world.forward(some, new)
    assert len(world.given[1]) == 3
    world.check(1)


@on_host
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
    found = AttentionStatistics(rows, torch.zeros(2049, dtype=torch.int64), needs)
    assert max(taken) == 33 * 131_076, "whether one request of the whole context has memory"
    taken.clear()
    assert found.begin([7, 9], [1000, 30], [1000, 30]) is not None
    assert sum(taken) < 2 * 33 * 1030 + 2 * 32 * 33


@pytest.mark.parametrize("entries", [1, 700, 1 << 19])
@pytest.mark.parametrize("new", [[1, 1, 1], [1, 7, 300], [1, 3, 4]], ids=str)
@on_host
def test_backend_gives_weights_and_computes_the_same(
    new: list[int], entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "_ENTRIES", entries)
    rig = Rig(shifted=0.0, heads=6)
    batch = rig.batch(new)
    decode = batch.forward_mode.is_decode()
    backend = PagedCpuBackend(rig.runner, rig.cached_at)
    plain = rig.forward(backend, batch)
    found = backend.paged.keep_statistics(StatisticsNeeds(latest=5, total=True, prompt=5))
    before = [length - 1 for length in rig.lengths]
    if decode:
        # A request is known from its prefill on.
        found.begin(rig.row_of, before, before)
    assert torch.equal(rig.forward(backend, batch), plain)
    expected = dense_weights(rig, batch, 5)
    for row, length, count, right in zip(rig.row_of.tolist(), LENGTHS, new, expected, strict=True):
        held, queries = np.arange(length), min(count, 5)
        if not decode:
            torch.testing.assert_close(found.total(row, held), right, rtol=1e-4, atol=1e-6)
        latest = found.latest(row, held, 5 if not decode else 1) * queries
        torch.testing.assert_close(latest, right, rtol=1e-4, atol=1e-6)


@on_host
def test_all_policies_get_what_they_announce() -> None:
    def named(*policies: Any) -> list[NamedPolicy]:
        return [NamedPolicy("one", SimpleNamespace(**policy)) for policy in policies]  # type: ignore[arg-type]

    def reads(needs: StatisticsNeeds) -> dict[str, Any]:
        return {"needs": {ATTENTION}, "statistics_needs": needs}

    assert needs_of([]) is None
    assert needs_of(named({"needs": set(), "statistics_needs": WANTED})) is None
    latest, total = StatisticsNeeds(latest=8, prompt=8), StatisticsNeeds(total=True, prompt=3)
    assert needs_of(named(reads(latest), reads(total))) == StatisticsNeeds(8, True, 8)


@on_host
def test_weights_are_averaged_over_heads() -> None:
    world = World(1, WANTED)
    world.forward([2], [5])
    world.forward([2], None)
    held = np.array([0, 2, 5])
    found = HeldAttention(AttentionSource(world.statistics, heads=24), 2, held)
    given = [torch.nn.functional.pad(w, (0, 5 - q))[held] for q, w in world.given[2].items()]
    np.testing.assert_allclose(found.total(), sum(given) / 24, rtol=1e-6)
    np.testing.assert_allclose(found.latest(1), given[-1] / 24, rtol=1e-6)


# -- on a device ----------------------------------------------------------------------


@under_interpreter
def test_memory_of_rows_without_an_owner_is_given_back_when_it_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(1, WANTED)
    unowned: list[int] = []
    world.statistics = DeviceStatistics(world.rows, world.generations, WANTED, lambda: unowned)
    for row in (1, 2):
        world.begin(row, 0)
    unowned.append(1)
    # Room for the memory of two rows.
    monkeypatch.setattr(DeviceStatistics, "_fits", lambda self, _wanted: len(self._memory) < 2)
    world.begin(3, 0)
    assert set(world.statistics._memory) == {2, 3}
    world.check(2)
    world.check(3)
    # There is none for a third one, which gets it once another row is nobody's.
    unowned.clear()
    world.begin(1, 0)
    assert not world.statistics.total(1, torch.arange(1)).any()
    unowned.append(2)
    world.begin(1, 0)
    world.check(1)


@on_host
def test_weights_of_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fewer queries of each, at least one."""
    rows, generations = torch.zeros(9, 600).int(), torch.ones(9).long()
    for bound, counts in ((6 * 1200, [6, 6, 4]), (2 * 1200, [2, 2, 2]), (1, [1, 1, 1])):
        monkeypatch.setattr(statistics, "_WEIGHTS", bound)
        found = DeviceStatistics(rows, generations, WANTED)
        batch = found.begin([1, 2, 3], [600, 300, 300], [600, 20, 4])
        assert batch is not None and batch.counts == counts
        assert found._first[1:4].tolist() == [600 - counts[0], 300 - counts[1], 300 - counts[2]]


@under_interpreter
def test_rows_and_positions_out_of_range_are_left_alone() -> None:
    """A graph's padding, rows without memory, and lengths beyond it."""
    found = DeviceStatistics(torch.zeros(4, 600).int(), torch.zeros(4).long(), WANTED)
    found.begin([2], [10], None)
    memory = found._memory[2].fill_(7)
    buffers = PlanBuffers.of(4, 900, "cpu", positions=True)
    buffers.kv_indptr.copy_(torch.tensor([0, 5, 10, 15, 615]))
    assert buffers.positions is not None
    buffers.positions[:5] = torch.tensor([-1, 0, 255, 256, 2**31 - 1])
    buffers.positions[15:615] = torch.arange(600)
    weights = torch.ones(700)
    requests, lengths = torch.tensor([2, 0, 9, -1]), torch.tensor([1000, 5, 5, 600])
    found.decode(BatchRows(buffers, requests, lengths, 600), weights).apply()
    assert not weights[:615].any() and weights[615:].all()
    changed = (memory != 7).nonzero().tolist()
    assert changed == [[999 % 4, 0], [999 % 4, 255], [4, 0], [4, 255]]
    # A query before the first position has no place in the memory.
    around = torch.full((3, 5, 256), 7.0)
    found._bases[2] = around[1].data_ptr()
    buffers = PlanBuffers.of(2, 20, "cpu", positions=True)
    for length in (0, -1, -300):
        read = BatchRows(buffers, torch.tensor([2, 2]), torch.tensor([length, length]), 20)
        found.decode(read, torch.zeros(20)).apply()
        assert (around == 7).all(), length


@pytest.fixture
def rig() -> Rig:
    return Rig(shifted=0.0, lengths=SHORT, heads=4, kv_heads=2)


@pytest.fixture
def backend(rig: Rig, ranks: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = triton_backend(rig, monkeypatch)
    # Who gets which row is SGLang's to count.
    rig.rows.req_generation += 1
    return made


@under_interpreter
@pytest.mark.parametrize("shifts", [False, True], ids=["stock", "ours"])
def test_prefill_then_decode(rig: Rig, backend: Any, shifts: bool) -> None:
    """SGLang's kernels or ours for the prefill; then graphs of two sizes, padded or not, eager
    steps and a batch with prompts take turns."""
    plain = rig.forward(backend, announced(backend, rig.batch(SHORT)))
    found = backend.paged.keep_statistics(StatisticsNeeds(latest=3, total=True, prompt=4))
    assert backend.paged.keep_statistics(StatisticsNeeds()) is found
    graphs = Graphs(rig, backend)
    assert {label for _, label in graphs.graphs} == {SHIFTED}
    free = rig.pool.k_buffer[0].isnan().all(dim=(1, 2)).nonzero()[:, 0].tolist()
    rows, lengths, total = rig.row_of, [0, 0, 0], [torch.zeros(0)] * 3
    for runner, some, new in (
        (backend, [0, 1, 2], SHORT),
        (graphs, [0, 1], [1, 1]),
        (graphs, [2], [1]),
        (backend, [0, 1, 2], [1, 1, 1]),
        (graphs, [2, 0], [1, 1]),
        (backend, [1, 2, 0], [1, 4, 1]),
        (graphs, [1], [1]),
        (graphs, [0, 1, 2], [1, 1, 1]),
    ):
        for b, count in zip(some, new, strict=True):
            for at in range(max(lengths[b], SHORT[b]), lengths[b] + count):
                rig.rows.req_to_token[rows[b], at] = free.pop(0)
            lengths[b] += count
        rig.row_of, rig.lengths = rows[some], [lengths[b] for b in some]
        batch = announced(backend, rig.batch(new))
        if new == SHORT:
            mark(batch, shifts)
            assert not backend.can_run_prefill_cuda_graph(batch)
        out = rig.forward(runner, batch)
        assert new != SHORT or shifts or torch.equal(out, plain)
        sums, newest = dense_weights(rig, batch, 4), dense_weights(rig, batch, 3)
        for i, (b, count) in enumerate(zip(some, new, strict=True)):
            row, held, last = int(rows[b]), torch.arange(lengths[b]), min(count, 3)
            total[b] = torch.nn.functional.pad(total[b], (0, count)) + sums[i]
            torch.testing.assert_close(found.total(row, held), total[b], rtol=1e-3, atol=1e-5)
            latest = found.latest(row, held, last) * last
            torch.testing.assert_close(latest, newest[i], rtol=1e-3, atol=1e-5)
        assert runner is backend or not backend._graphs[-1][1].any()
    assert set(graphs.replayed) == {SHIFTED}
    # Of the padding.
    assert int(found._bases[0]) == 0


@under_interpreter
def test_a_batch_that_nobody_announced_is_not_noted(rig: Rig, backend: Any) -> None:
    """SGLang's own trial runs, whose rows are nobody's or another's; another batch was announced."""
    found = backend.paged.keep_statistics(WANTED)

    def totals() -> torch.Tensor:
        rows = zip(rig.row_of.tolist(), rig.lengths, strict=True)
        return torch.cat([found.total(row, torch.arange(length)) for row, length in rows])

    rig.forward(backend, announced(backend, rig.batch([1, 7, 30])))
    before = totals()
    assert before.all()
    announced(backend, rig.batch([1, 3, 4]))
    rig.forward(backend, rig.batch([1, 3, 4]))
    assert torch.equal(totals(), before)


@under_interpreter
def test_evicted_positions_are_not_there(rig: Rig, backend: Any) -> None:
    found = backend.paged.keep_statistics(StatisticsNeeds(latest=2, total=True, prompt=2))
    rig.evict([1, 3, 30], share=0.3)
    for new in ([1, 3, 30], [1, 1, 1]):
        batch = announced(backend, rig.batch(new))
        mark(batch, True)
        rig.forward(backend, batch)
        for row, length in zip(rig.row_of.tolist(), rig.lengths, strict=True):
            held = (rig.rows.req_to_token[row, :length] >= 0).nonzero()[:, 0]
            # Every query head gives out a weight of 1.
            weight = float(found.latest(row, held, 1).sum())
            assert weight == pytest.approx(rig.heads, rel=1e-3)
