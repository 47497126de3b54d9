# SPDX-License-Identifier: Apache-2.0
"""Pages selected on a device, under Triton's interpreter: as on the CPU, and in graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from sglang_reasoncache.attention.paged_cuda import SHIFTED, GraphVariants
from sglang_reasoncache.eviction.policies.contract import StatisticsNeeds
from sglang_reasoncache.kernels import decode_triton, plan_triton, select_triton
from sglang_reasoncache.kernels.batch import BatchRows
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into
from sglang_reasoncache.kernels.reference import plan_rows
from sglang_reasoncache.selection import page_bounds
from sglang_reasoncache.selection.device_selection import DeviceSelection
from sglang_reasoncache.selection.host_selection import HostSelection
from sglang_reasoncache.selection.page_bounds import PageBounds
from sglang_reasoncache.selection.quest import Quest
from tests.selection.selectors import NONSENSE, wrong
from tests.triton_runs import INTERPRETED, run_interpreted, starts_interpreter
from tests.unit.attention_rig import TOLERANCE, Rig
from tests.unit.test_attention_cuda_graph import Graphs, triton_backend

pytestmark = pytest.mark.usefixtures("published_config", "out_of_tree_platform")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs under the interpreter")

PAGE, HEADS, KV_HEADS, DIM = 4, 4, 2, 16
WIDTH, PAGES = 62, 60
SLOTS = PAGES * PAGE
SCALE = DIM**-0.5


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are read by Triton, as on a device; few programs for the interpreter."""
    if INTERPRETED:
        paged = functools.partial(PagedKv, backend="triton")
        monkeypatch.setattr(page_bounds, "PagedKv", paged)
        monkeypatch.setattr(decode_triton, "SPLITS", 2)
        monkeypatch.setattr(plan_triton, "PIECES", 2)
        monkeypatch.setattr(decode_triton, "PIECES", 2)
        monkeypatch.setattr(select_triton, "PAGES", 16)


def chosen_on_host(
    host: HostSelection, rows: torch.Tensor, request: int, length: int, layer: int, query: Any
) -> torch.Tensor:
    """bool, which entries of one row the CPU reads."""
    host._rows = rows
    where = torch.tensor([request]), torch.tensor([length])
    plan = RowPlan(*plan_rows(rows, *where, None, 1 << 20))
    host.begin(BatchRows(plan, *where, length), False)
    assert host.plan(layer, query, SCALE) is not None
    return host._among


class World:
    """Rows of whole pages with evicted positions, some naming one page twice, in two layers."""

    def __init__(self, seed: int, *, shifted: bool = False, policy: Any = None) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.shared_slots = shifted
        self.keys = {
            layer: torch.randn(SLOTS, KV_HEADS, DIM, generator=self.generator) for layer in (3, 4)
        }
        self.rows = torch.zeros(5, WIDTH, dtype=torch.int32)
        self.cached_at = torch.zeros(SLOTS, dtype=torch.int32)
        self.policy = policy or Quest(budget=12, whole_layers=0)
        self.device = DeviceSelection(
            "quest", self.policy, self.keys, PAGE, self.rows, self.cached_at if shifted else None
        )
        self.host = HostSelection("quest", self.policy, self.keys, PAGE, self.rows, None)
        # Bounds are those of pages as they lie, on both sides.
        for bounds in self.host._bounds.values():
            bounds._paged = PagedKv(bounds.ends, bounds.ends[..., :1], backend="torch")
        for layer in self.keys:
            self.host.update(layer, torch.arange(SLOTS))
        for layer, bounds in self.device._bounds.items():
            bounds.ends.copy_(self.host._bounds[layer].ends)
        self.device.allocate_graphs(4, weighs=True)
        self.buffers = PlanBuffers.of(4, 4 * WIDTH, "cpu", positions=True)
        self.fill()

    def fill(self) -> None:
        """Other rows, lengths and cached positions."""
        random = functools.partial(torch.rand, generator=self.generator)
        pages = torch.randperm(PAGES - 1, generator=self.generator) + 1
        self.requests = torch.randperm(5, generator=self.generator)[:3]
        self.lengths = torch.randint(1, WIDTH + 1, (3,), generator=self.generator)
        self.lengths[0] = WIDTH
        given = iter(pages.tolist())
        for row, length in zip(self.requests.tolist(), self.lengths.tolist(), strict=True):
            own = [next(given) for _ in range(-(-length // PAGE))]
            for i in range(1, len(own) - 1):
                # Shared with an earlier position of the row, or evicted.
                own[i] = own[0] if random(1) < 0.2 else -1 if random(1) < 0.2 else own[i]
            for at in range(length):
                page = own[at // PAGE]
                slot = page * PAGE + at % PAGE if page >= 0 else -1
                self.rows[row, at] = slot
                if self.shared_slots and page >= 0 and own.index(page) == at // PAGE:
                    self.cached_at[slot] = at
            # Beyond the row's end lies what an earlier request left.
            self.rows[row, length:] = 8
        self.query = torch.randn(3, HEADS, DIM, generator=self.generator) * 3

    def begin(self, graph: bool) -> None:
        requests, lengths = self.requests, self.lengths
        if graph:
            # Padded, as SGLang does.
            requests = torch.nn.functional.pad(requests, (0, 1))
            lengths = torch.nn.functional.pad(lengths, (0, 1), value=1)
        cached_at = self.cached_at if self.shared_slots else None
        plan_into(self.buffers, self.rows, requests, lengths, cached_at, num_slots=SLOTS)
        read = BatchRows(self.buffers, requests, lengths, WIDTH if graph else int(lengths.max()))
        if graph:
            self.device.begin_graph(read)
        else:
            self.device.begin(read, True)

    def away(self) -> torch.Tensor:
        """bool ``[rows, width]``: positions whose page is used with a position shift."""
        rows = self.rows[self.requests].long()
        elsewhere = (rows >= 0) & (self.cached_at[rows.clamp_min(0)] != torch.arange(WIDTH))
        return elsewhere & self.shared_slots & (torch.arange(WIDTH) < self.lengths[:, None])

    def expected(self, layer: int) -> list[list[int]]:
        """Positions read, by the CPU's selection of what is not shifted."""
        away = self.away()
        rows = self.rows.clone()
        rows[self.requests] = rows[self.requests].masked_fill(away, -1)
        read: list[list[int]] = []
        for i, length in enumerate(self.lengths.tolist()):
            own = rows[self.requests[i], :length]
            at = torch.arange(length)
            if length <= self.policy.budget:
                read.append(at[self.rows[self.requests[i], :length] >= 0].tolist())
                continue
            one = int(self.requests[i]), length, layer, self.query[i : i + 1]
            chosen = at[own >= 0][chosen_on_host(self.host, rows, *one)]
            read.append(sorted({*chosen.tolist(), *at[away[i, :length]].tolist()}))
        return read

    def found(self, layer: int) -> list[list[int]]:
        """Positions in the plan; its slots and shifts are those of the rows there."""
        query = self.query
        assert self.device._step is not None
        batch = len(self.device._step.lengths)
        query = torch.cat((query, query[:1]))[:batch]
        some = self.device.plan(layer, query, SCALE)
        assert some is not None
        rows, weights = some
        entries = self.device._step.buffers.plan.positions
        assert entries is not None and self.buffers.positions is not None and weights is not None
        assert (rows.shift is not None) == self.shared_slots
        read = []
        for i in range(3):
            span = slice(int(rows.kv_indptr[i]), int(rows.kv_indptr[i + 1]))
            at = self.buffers.positions[entries[span].long()].long()
            slots = self.rows[self.requests[i], at]
            assert torch.equal(rows.kv_indices[span], slots)
            if rows.shift is not None:
                assert torch.equal(rows.shift[span].long(), at - self.cached_at[slots.long()])
            read.append(at.tolist())
        return read


@interpreted
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_the_same_pages_as_on_the_cpu(graph: bool, shifted: bool) -> None:
    """Ragged rows with evicted positions and pages used twice; counts are those of rows beyond the budget."""
    world = World(1, shifted=shifted)
    held = read = 0
    for _ in range(3):
        world.fill()
        assert world.away().any() == shifted
        world.begin(graph)
        for layer in world.keys:
            found = world.found(layer)
            assert found == world.expected(layer)
            for i, length in enumerate(world.lengths.tolist()):
                if length > world.policy.budget:
                    held += int((world.rows[world.requests[i], :length] >= 0).sum())
                    read += len(found[i])
    counts = {"positions_held": held, "positions_read": read}
    assert world.device.describe() == {"name": "quest", **counts, "refusals": {}}
    assert 0 < read < held
    # What Prometheus gets is the state of an earlier call.
    assert world.device.recent()["positions_read"] == 0
    assert world.device.recent() == world.device.describe()


@interpreted
def test_weights_go_to_the_entries_they_are_of() -> None:
    world = World(2, shifted=True)
    world.begin(graph=True)
    found = world.found(3)
    room = world.device._graph_buffers[0]
    assert room.weights is not None and world.buffers.positions is not None
    count = int(room.plan.kv_indptr[4])
    room.weights[:count] = torch.arange(1.0, count + 1)
    sums = torch.zeros(4 * WIDTH)
    world.device.add(sums)
    assert not room.weights.any()
    ends = world.buffers.kv_indptr.tolist()
    given = iter(range(1, count + 1))
    for i in range(3):
        at = world.buffers.positions[ends[i] : ends[i + 1]].tolist()
        expected = {place: next(given) for place in found[i]}
        assert sums[ends[i] : ends[i + 1]].tolist() == [expected.get(place, 0) for place in at]


@interpreted
def test_short_rows_and_first_layers_are_read_whole() -> None:
    world = World(3, policy=Quest(budget=WIDTH, whole_layers=1))
    world.begin(graph=False)
    assert world.device.plan(4, world.query, SCALE) is None, "all rows are within the budget"
    world.begin(graph=True)
    assert world.device.plan(3, world.query, SCALE) is None, "a first layer"
    assert world.found(4) == world.expected(4)
    assert world.device.describe()["positions_held"] == 0
    world.device.forget()
    assert world.device.plan(4, world.query, SCALE) is None, "no step was begun"


@interpreted
@pytest.mark.parametrize(("answer", "refusal", "message"), NONSENSE)
def test_nonsense_is_refused_by_name(answer: Any, refusal: str, message: str) -> None:
    """While a graph is captured it ends the start, outside of graphs everything is read."""
    world = World(4, policy=wrong(answer, budget=12))
    world.begin(graph=False)
    assert world.device.plan(3, world.query, SCALE) is None
    assert world.device.describe()["refusals"] == {refusal: 1}
    world.begin(graph=True)
    query = torch.cat((world.query, world.query[:1]))
    with pytest.raises(ValueError, match=f"--reasoncache-policy quest: keep .*{message}"):
        world.device.plan(3, query, SCALE)


@interpreted
def test_the_newest_page_is_read_whatever_the_answer() -> None:
    world = World(4, policy=wrong(lambda keep, _newest: torch.zeros_like(keep), budget=12))
    # Within the budget: read whole, and not counted.
    world.lengths[1] = 9
    world.begin(graph=True)
    found = world.found(3)
    beyond = 0
    for read, length in zip(found, world.lengths.tolist(), strict=True):
        if length > 12:
            assert read == list(range((length - 1) // PAGE * PAGE, length))
            beyond += 1
        else:
            row = world.rows[world.requests[1], :9]
            assert length == 9 and read == torch.arange(9)[row >= 0].tolist()
    assert world.device.describe()["refusals"] == {"newest": beyond}


class Wasteful(Quest):
    """Reads its tensors on the host."""

    poll: Any = None

    def keep(self, shares: Any, held: Any, newest: Any, page: int) -> Any:
        self.poll(shares, held)
        return super().keep(shares, held, newest, page)


WAITS = {
    "item": lambda shares, _held: shares.max().item(),
    "branch": lambda shares, _held: 1 if (shares > 2).any() else 0,
    "mask": lambda shares, held: shares[held],
    "assigned": lambda shares, held: shares.__setitem__(held, 0.5 * shares[0, :1]),
    "nonzero": lambda _shares, held: held.nonzero(),
    "equal": lambda shares, _held: torch.equal(shares, shares),
}


def rig_of(lengths: list[int], *, shifted: tuple[int, ...] = ()) -> Rig:
    """Rows of whole pages of 8 in a pool; the pages of the longest row named in ``shifted`` are
    cached for other positions."""
    rig = Rig(shifted=0.0, lengths=lengths, heads=2, kv_heads=1, notes_shifted=bool(shifted))
    rig.runner.token_to_kv_pool_allocator.page_size = 8
    for buffer in (*rig.pool.k_buffer, *rig.pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=rig.generator))
    place(rig, lengths, shifted)
    return rig


def place(rig: Rig, lengths: list[int], shifted: tuple[int, ...] = ()) -> None:
    rig.lengths = lengths
    count = len(rig.pool.k_buffer[1]) // 8 - 1
    pages = iter((torch.randperm(count, generator=rig.generator) + 1).tolist())
    for row, length in zip(rig.row_of.tolist(), lengths, strict=True):
        for start in range(0, length, 8):
            slots = next(pages) * 8 + torch.arange(min(8, length - start))
            rig.rows.req_to_token[row, start : start + len(slots)] = slots.to(torch.int32)
            away = 40 if start // 8 in shifted and length == max(lengths) else 0
            rig.cached_at.record(slots, start + away + torch.arange(len(slots)))


@pytest.fixture
def ranks() -> Iterator[None]:
    with get_parallel().override(attn_dcp_rank=0, attn_tp_rank=0):
        yield


POLICY = Quest(budget=24, whole_layers=1)


def noted(rig: Rig, backend: Any) -> Any:
    """The backend, with bounds of what is in the pool now."""
    if backend.paged.selection is None:
        backend.paged.select("quest", POLICY)
    backend.paged.selection.update(1, torch.arange(len(rig.pool.k_buffer[1])))
    return backend


def read_of(rig: Rig) -> list[torch.Tensor]:
    """bool ``[length]`` of each row: what the layer reads, by the CPU's selection over the pool."""
    keys = {0: rig.pool.k_buffer[0], 1: rig.pool.k_buffer[1]}
    host = HostSelection("quest", POLICY, keys, 8, rig.rows.req_to_token, None)
    bounds = host._bounds[1]
    bounds._paged = PagedKv(bounds.ends, bounds.ends[..., :1], backend="torch")
    read = []
    for i, (row, length) in enumerate(zip(rig.row_of, rig.lengths, strict=True)):
        slots = rig.rows.req_to_token[row, :length].long()
        held = slots >= 0
        host.update(1, slots[held])
        away = held & (rig.cached_at.positions[slots.clamp_min(0)] != torch.arange(length))
        if length <= POLICY.budget:
            read.append(held)
            continue
        rows = rig.rows.req_to_token[row : row + 1].clone()
        rows[0, :length][away] = -1
        chosen = away.clone()
        query = rig.query[i : i + 1]
        chosen[rows[0, :length] >= 0] = chosen_on_host(host, rows, 0, length, 1, query)
        read.append(chosen)
    return read


def check(rig: Rig, backend: Any, batch: Any) -> None:
    """Dense attention over what the CPU would read, everything else masked."""
    found = rig.forward(backend, batch)
    kept = rig.rows.req_to_token.clone()
    for row, read in zip(rig.row_of, read_of(rig), strict=True):
        assert read.sum() < len(read) or len(read) <= POLICY.budget
        rig.rows.req_to_token[row, : len(read)][~read] = -1
    expected = rig.expected(batch)
    rig.rows.req_to_token.copy_(kept)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[rig.dtype])


@interpreted
def test_decode_reads_what_was_selected(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and in graphs, one row within the budget; rows, cached and evicted positions change in between."""
    rig = rig_of([70, 19, 41], shifted=(1, 4))
    backend = noted(rig, triton_backend(rig, monkeypatch))
    assert GraphVariants(backend).capture_labels == (SHIFTED,)
    check(rig, backend, rig.batch([1, 1, 1]))
    graphs = Graphs(rig, backend)
    check(rig, graphs, rig.batch([1, 1, 1]))
    place(rig, [33, 64, 1], shifted=(2,))
    noted(rig, backend)
    rig.rows.req_to_token[rig.row_of[1], 8:16] = -1
    rig.runner.token_to_kv_pool_allocator.has_evicted = True
    check(rig, graphs, rig.batch([1, 1, 1]))
    check(rig, backend, rig.batch([1, 1, 1]))
    rig.row_of = rig.row_of[:1]
    place(rig, [60])
    noted(rig, backend)
    check(rig, graphs, rig.batch([1]))
    assert set(graphs.replayed) == {SHIFTED}
    seen = backend.paged.selection.describe()
    assert seen["refusals"] == {} and 0 < seen["positions_read"] < seen["positions_held"]


@interpreted
def test_bounds_follow_every_forward(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts by SGLang's kernels and by ours, then token by token, where keys are as cached."""
    rig = rig_of([30, 9, 17])
    backend = triton_backend(rig, monkeypatch, corrected=False)
    selection = backend.paged.select("quest", POLICY)

    def right() -> None:
        keys, ends = rig.pool.k_buffer[1], selection._bounds[1].ends
        for row, length in zip(rig.row_of, rig.lengths, strict=True):
            for start in range(0, length, 8):
                slots = rig.rows.req_to_token[row, start : min(start + 8, length)].long()
                page = int(slots[0]) // 8
                assert torch.equal(ends[page, :, :16], keys[slots].amax(dim=0))
                assert torch.equal(ends[page, :, 16:], keys[slots].amin(dim=0))

    for evicted in (False, True):
        rig.runner.token_to_kv_pool_allocator.has_evicted = evicted
        batch = rig.batch([30, 9, 17])
        backend.kv_index_translator.bind_runner_slots(batch)
        assert not backend.can_run_prefill_cuda_graph(batch)
        rig.forward(backend, batch)
        right()
    for _ in range(2):
        batch = rig.batch([1, 1, 1])
        backend.kv_index_translator.bind_runner_slots(batch)
        check(rig, backend, batch)
        right()


@interpreted
def test_statistics_of_what_was_selected(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was left out weighs nothing, the rest sums to one a head; eager and in graphs."""
    rig = rig_of([70, 12, 40], shifted=(3,))
    backend = triton_backend(rig, monkeypatch)
    statistics = backend.paged.keep_statistics(StatisticsNeeds(latest=1, total=True))
    noted(rig, backend)
    graphs = Graphs(rig, backend)
    for runner in (backend, graphs):
        batch = rig.batch([1, 1, 1])
        coming = statistics.begin(rig.row_of.tolist(), rig.lengths, None)
        backend.expect(batch.rids, coming)
        check(rig, runner, batch)
        for row, read in zip(rig.row_of.tolist(), read_of(rig), strict=True):
            # Nothing announced the request: the memory is read as it is.
            weights = statistics._memory[row][0, : len(read)]
            assert float(weights.sum()) == pytest.approx(rig.heads, rel=1e-4)
            assert torch.equal(weights > 0, read)


@interpreted
@pytest.mark.parametrize("poll", WAITS.values(), ids=WAITS)
def test_a_selector_that_waits_is_refused_at_the_start(
    poll: Any, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_of([70, 12])
    backend = triton_backend(rig, monkeypatch)
    policy = Wasteful(budget=24, whole_layers=0)
    object.__setattr__(policy, "poll", poll)
    with pytest.raises(ValueError, match="--reasoncache-policy slow: keep .* waits for the device"):
        backend.paged.select("slow", policy)
    assert backend.paged.selection is None and not backend.paged.always_needed
    object.__setattr__(policy, "poll", lambda shares, _held: shares[:, torch.tensor([0, 1])])
    assert backend.paged.select("fast", policy).describe()["positions_held"] == 0


@interpreted
@pytest.mark.parametrize(("answer", "_refusal", "message"), NONSENSE[-2:])
def test_nonsense_is_refused_at_the_start(
    answer: Any, _refusal: str, message: str, ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = triton_backend(rig_of([70, 12]), monkeypatch)
    with pytest.raises(ValueError, match=f"--reasoncache-policy odd: keep .*{message}"):
        backend.paged.select("odd", wrong(answer, budget=12))


@interpreted
def test_bounds_without_memory_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(PageBounds, "__init__", none)
    with pytest.raises(MemoryError, match="Tried to allocate"):
        World(1)
