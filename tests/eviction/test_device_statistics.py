# SPDX-License-Identifier: Apache-2.0
"""Weights found on a device: the same requests as in host memory, under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from sglang_reasoncache.attention.paged_cuda import SHIFTED
from sglang_reasoncache.eviction import statistics
from sglang_reasoncache.eviction.device_statistics import DeviceStatistics, DeviceUpdate
from sglang_reasoncache.eviction.policies.contract import StatisticsNeeds
from sglang_reasoncache.kernels import note_triton, plan_triton
from sglang_reasoncache.kernels.batch import BatchRows
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into
from sglang_reasoncache.plugin import cuda_attention
from tests.eviction.statistics_world import (
    SLOTS,
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
from tests.triton_runs import INTERPRETED, run_interpreted, starts_interpreter
from tests.unit.attention_rig import Rig
from tests.unit.test_attention_cuda_graph import LENGTHS, Graphs, triton_backend

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs under the interpreter")


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def small_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and programs for short rows, and little for the interpreter to do."""
    if INTERPRETED:
        monkeypatch.setattr(plan_triton, "PIECES", 2)
        monkeypatch.setattr(note_triton, "PIECES", 2)
        monkeypatch.setattr(note_triton, "TILE", 16)


class DeviceWorld(World):
    """Its weights go the way of a GPU, decode steps in buffers that stay."""

    def made(self) -> DeviceStatistics:
        self.buffers = PlanBuffers.of(8, 8 * self.rows.shape[1], "cpu", positions=True)
        self.weights = torch.zeros(8 * self.rows.shape[1])
        return DeviceStatistics(self.rows, self.generations, self.wanted)

    def begin_forward(
        self, requests: torch.Tensor, lengths: torch.Tensor, new: list[int] | None
    ) -> torch.Tensor:
        prefill = self.statistics.begin(requests.tolist(), lengths.tolist(), new)
        plan_into(self.buffers, self.rows, requests, lengths, num_slots=SLOTS)
        if prefill is None:
            # As in a graph: SGLang's buffers, written anew before each replay.
            where = requests.clone(), lengths.clone()
            read = BatchRows(self.buffers, *where, self.rows.shape[1])
            self.update = self.statistics.decode(read, self.weights)
        else:
            read = BatchRows(self.buffers, requests, lengths, int(lengths.max()))
            self.update, queries = self.statistics.prefill(read, prefill)
            spans = queries.spans[1] - queries.spans[0]
            assert len(self.update.weights) >= spans.sum()
            assert not len(spans) or spans.max() <= self.update.longest
        return self.update.weights

    def done(self) -> None:
        super().done()
        # Ready for the next step.
        assert not self.update.weights.any()


@interpreted
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "wanted",
    [
        WANTED,
        StatisticsNeeds(latest=8, prompt=2),
        StatisticsNeeds(total=True, prompt=6),
        StatisticsNeeds(latest=3, total=True),
    ],
    ids=str,
)
def test_sums_are_those_of_all_weights_given(
    seed: int, wanted: StatisticsNeeds, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_memory(monkeypatch)
    assert_sums(DeviceWorld(seed, wanted), steps=80, least=20)


@interpreted
def test_nothing_of_the_last_request_in_a_row_is_left() -> None:
    assert_nothing_is_left(DeviceWorld(1, WANTED))


@interpreted
def test_without_memory_positions_count_as_never_looked_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert_works_without_memory(DeviceWorld(1, WANTED), monkeypatch, caplog)


@interpreted
def test_memory_of_rows_without_an_owner_is_given_back_when_it_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = DeviceWorld(1, WANTED)
    unowned: list[int] = []
    world.statistics = DeviceStatistics(world.rows, world.generations, WANTED, lambda: unowned)
    for row in (1, 2):
        world.begin(row, 0)
    unowned.append(1)
    # Room for the memory of two rows.
    monkeypatch.setattr(
        DeviceStatistics, "_fits", lambda self, _wanted: len(self._memory) < 2, raising=True
    )
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


def test_weights_of_prompts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fewer queries of each, at least one."""
    rows, generations = torch.zeros(9, 600).int(), torch.ones(9).long()
    for bound, counts in ((6 * 1200, [6, 6, 4]), (2 * 1200, [2, 2, 2]), (1, [1, 1, 1])):
        monkeypatch.setattr(statistics, "_WEIGHTS", bound)
        found = DeviceStatistics(rows, generations, WANTED)
        batch = found.begin([1, 2, 3], [600, 300, 300], [600, 20, 4])
        assert batch is not None and batch.counts == counts
        assert found._first[1:4].tolist() == [600 - counts[0], 300 - counts[1], 300 - counts[2]]


@interpreted
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
    found.apply(DeviceUpdate(weights, 600, BatchRows(buffers, requests, lengths, 600)))
    assert not weights[:615].any() and weights[615:].all()
    changed = (memory != 7).nonzero().tolist()
    assert changed == [[999 % 4, 0], [999 % 4, 255], [4, 0], [4, 255]]


@interpreted
def test_without_positions_nothing_is_written() -> None:
    """A query before the first position has no place in the memory."""
    found = DeviceStatistics(torch.zeros(4, 600).int(), torch.zeros(4).long(), WANTED)
    found.begin([2], [10], None)
    around = torch.full((3, 5, 256), 7.0)
    found._bases[2] = around[1].data_ptr()
    buffers = PlanBuffers.of(2, 20, "cpu", positions=True)
    for length in (0, -1, -300):
        read = BatchRows(buffers, torch.tensor([2, 2]), torch.tensor([length, length]), 20)
        found.apply(DeviceUpdate(torch.zeros(20), 20, read))
        assert (around == 7).all(), length


@interpreted
def test_no_memory_at_the_start_is_an_error() -> None:
    assert_no_memory_is_an_error(DeviceStatistics)


@interpreted
def test_only_what_was_announced_can_be_read() -> None:
    assert_only_announced(DeviceStatistics)


@pytest.fixture
def rig() -> Rig:
    return Rig(shifted=0.0, lengths=LENGTHS, heads=4, kv_heads=2)


@pytest.fixture
def backend(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with get_parallel().override(attn_dcp_rank=0, attn_tp_rank=0):
        made = triton_backend(rig, monkeypatch)
        # Who gets which row is SGLang's to count.
        rig.rows.req_generation += 1
        yield made


def announced(backend: Any, batch: Any) -> Any:
    """The batch as the hook lets the backend know it."""
    tree = SimpleNamespace(reads_shifted=lambda _reqs: False, reads_evicted=lambda _reqs: False)
    cuda_attention._after_forward_batch(
        batch,
        type(batch),
        SimpleNamespace(
            tree_cache=tree,
            reqs=[],
            req_pool_indices_cpu=batch.req_pool_indices,
            seq_lens_cpu=batch.seq_lens,
        ),
        SimpleNamespace(is_draft_worker=False),
    )
    if hasattr(backend, "kv_index_translator"):
        backend.kv_index_translator.bind_runner_slots(batch)
    return batch


def assert_weights(rig: Rig, found: Any, batch: Any, new: list[int], queries: int) -> None:
    """After a forward of rows without a past."""
    for row, length, count, right in zip(
        rig.row_of.tolist(), rig.lengths, new, dense_weights(rig, batch, queries), strict=True
    ):
        held, last = torch.arange(length), min(count, queries)
        latest = found.latest(row, held, last) * last
        torch.testing.assert_close(latest, right, rtol=1e-3, atol=1e-5)


@interpreted
@pytest.mark.parametrize("shifts", [False, True], ids=["stock", "ours"])
def test_prefill_then_decode(
    rig: Rig, backend: Any, shifts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's kernels or ours for the prefill; graphs and eager forwards for what follows."""
    monkeypatch.setattr(cuda_attention, "_backend", backend)
    plain = rig.forward(backend, announced(backend, rig.batch([1, 7, 30])))
    found = backend.paged.keep_statistics(StatisticsNeeds(latest=5, total=True, prompt=5))
    assert backend.paged.keep_statistics(StatisticsNeeds()) is found
    graphs = Graphs(rig, backend)
    assert {label for _, label in graphs.graphs} == {SHIFTED}
    batch = announced(backend, rig.batch([1, 7, 30]))
    backend.mark.note(batch.rids, shifts)
    assert not backend.can_run_prefill_cuda_graph(batch)
    out = rig.forward(backend, batch)
    if not shifts:
        assert torch.equal(out, plain)
    assert_weights(rig, found, batch, [1, 7, 30], 5)
    total = [
        found.total(row, torch.arange(length))
        for row, length in zip(rig.row_of.tolist(), rig.lengths, strict=True)
    ]
    nobodys = rig.pool.k_buffer[0].isnan().all(dim=(1, 2)).nonzero()[:, 0].split(3)
    for runner, slots in zip((graphs, backend, graphs), nobodys, strict=False):
        rig.lengths = [length + 1 for length in rig.lengths]
        batch = announced(backend, rig.batch([1, 1, 1]))
        rig.rows.req_to_token[batch.req_pool_indices, batch.seq_lens - 1] = slots.int()
        batch.out_cache_loc = slots
        rig.forward(runner, batch)
        assert_weights(rig, found, batch, [1, 1, 1], 1)
        for b, (row, length) in enumerate(zip(rig.row_of.tolist(), rig.lengths, strict=True)):
            held = torch.arange(length)
            total[b] = torch.nn.functional.pad(total[b], (0, 1)) + found.latest(row, held, 1)
            torch.testing.assert_close(found.total(row, held), total[b], rtol=1e-4, atol=1e-6)
    assert set(graphs.replayed) == {SHIFTED}


@interpreted
def test_some_of_the_requests_in_graphs_and_without(
    rig: Rig, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of two sizes, padded or not, eager steps and a batch with prompts take turns."""
    monkeypatch.setattr(cuda_attention, "_backend", backend)
    found = backend.paged.keep_statistics(StatisticsNeeds(latest=3, total=True, prompt=4))
    graphs = Graphs(rig, backend)
    rows, lengths = rig.row_of, list(rig.lengths)
    free = rig.pool.k_buffer[0].isnan().all(dim=(1, 2)).nonzero()[:, 0].tolist()
    rig.forward(backend, announced(backend, rig.batch(lengths)))
    total = [found.total(int(row), torch.arange(n)) for row, n in zip(rows, lengths, strict=True)]
    for runner, some, new in (
        (graphs, [0, 1], [1, 1]),
        (graphs, [2], [1]),
        (backend, [0, 1, 2], [1, 1, 1]),
        (graphs, [2, 0], [1, 1]),
        (backend, [1, 2, 0], [1, 4, 1]),
        (graphs, [1], [1]),
        (graphs, [0, 1, 2], [1, 1, 1]),
    ):
        for b, count in zip(some, new, strict=True):
            for at in range(lengths[b], lengths[b] + count):
                rig.rows.req_to_token[rows[b], at] = free.pop(0)
            lengths[b] += count
        rig.row_of, rig.lengths = rows[some], [lengths[b] for b in some]
        batch = announced(backend, rig.batch(new))
        rig.forward(runner, batch)
        for b, count, right in zip(some, new, dense_weights(rig, batch, 4), strict=True):
            row, held = int(rows[b]), torch.arange(lengths[b])
            total[b] = torch.nn.functional.pad(total[b], (0, count)) + right
            torch.testing.assert_close(found.total(row, held), total[b], rtol=1e-3, atol=1e-5)
            if count == 1:
                torch.testing.assert_close(found.latest(row, held, 1), right, rtol=1e-3, atol=1e-5)
        assert not backend._graphs[-1][1].any()
    # Of the padding.
    assert int(found._bases[0]) == 0


@interpreted
def test_a_batch_that_nobody_announced_is_not_noted(
    rig: Rig, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own trial runs, whose rows are nobody's or another's; another batch was announced."""
    monkeypatch.setattr(cuda_attention, "_backend", backend)
    found = backend.paged.keep_statistics(WANTED)

    def totals() -> torch.Tensor:
        rows = zip(rig.row_of.tolist(), rig.lengths, strict=True)
        return torch.cat([found.total(row, torch.arange(length)) for row, length in rows])

    rig.forward(backend, announced(backend, rig.batch([1, 7, 30])))
    before = totals()
    assert before.all()
    announced(backend, rig.batch([1, 3, 4]))
    trial = rig.batch([1, 3, 4])
    backend.kv_index_translator.bind_runner_slots(trial)
    rig.forward(backend, trial)
    assert torch.equal(totals(), before)


@interpreted
def test_evicted_positions_are_not_there(
    rig: Rig, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "_backend", backend)
    found = backend.paged.keep_statistics(StatisticsNeeds(latest=2, total=True, prompt=2))
    rig.evict([1, 3, 30], share=0.3)
    for new in ([1, 3, 30], [1, 1, 1]):
        batch = announced(backend, rig.batch(new))
        backend.mark.note(batch.rids, True)
        rig.forward(backend, batch)
        for row, length in zip(rig.row_of.tolist(), rig.lengths, strict=True):
            held = (rig.rows.req_to_token[row, :length] >= 0).nonzero()[:, 0]
            # Every query head gives out a weight of 1.
            weight = float(found.latest(row, held, 1).sum())
            assert weight == pytest.approx(rig.heads, rel=1e-3)
