# SPDX-License-Identifier: Apache-2.0
"""Pages of a plan and their bounds: on a GPU if there is one, or interpreted beside
``test_attention_triton.py``."""

import functools
import random
from typing import Any

import pytest
import torch

from tests.selection.test_page_selection import selection_on_host
from tests.triton_runs import DEVICE, INTERPRETED, on_device, there
from tests.triton_runs import small_launches as small_launches

pytest.importorskip("triton")

from sglang_reasoncache.kernels import select_triton
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into
from sglang_reasoncache.kernels.row_plan import BatchRows, RowPlan
from sglang_reasoncache.selection import page_bounds
from sglang_reasoncache.selection.contract import Quest
from sglang_reasoncache.selection.device_selection import DeviceSelection

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PAGE, HEADS, DIM = 4, 2, 6


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=on_device)])
def test_bounds_are_those_of_the_keys_written(
    dtype: torch.dtype, slots_dtype: torch.dtype, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token or a page and more at once; a page that is filled anew starts anew."""
    if INTERPRETED:
        monkeypatch.setattr(select_triton, "KEYS", 2)
    world, pages = random.Random(4), 12
    keys = (torch.randn(pages * PAGE, 2 * HEADS, DIM) * 3).to(dtype)
    keys = (keys if on_host else there(keys))[:, ::2]
    bounds = page_bounds.PageBounds(keys, PAGE)
    filled = [0] * pages
    for _ in range(12 if INTERPRETED else 100):
        slots: list[int] = []
        decodes = world.random() < 0.5
        for page in world.sample(range(pages), 2):
            if filled[page] == PAGE or world.random() < 0.1:
                filled[page] = 0
            count = 1 if decodes else world.randint(1, PAGE - filled[page])
            slots += range(page * PAGE + filled[page], page * PAGE + filled[page] + count)
            filled[page] += count
        keys[slots] = (torch.randn(len(slots), HEADS, DIM) * 3).to(dtype).to(keys.device)
        if on_host:
            bounds.update(torch.tensor(slots, dtype=slots_dtype))
        else:  # as SGLang pads a batch
            padded = there(torch.tensor([*slots, 0, 0], dtype=slots_dtype))
            select_triton.note_bounds(keys, padded, bounds.ends, PAGE)
            filled[0] = max(filled[0], 1)
    for page, count in enumerate(filled):
        # The padding wrote to the first slot of page 0 alone.
        count = min(count, 1) if page == 0 and not on_host else count
        if count:
            held = keys[page * PAGE : page * PAGE + count].float()
            assert torch.equal(bounds.high[page].float(), held.amax(dim=0))
            assert torch.equal(bounds.low[page].float(), held.amin(dim=0))


@on_device
def test_slots_out_of_range_are_left_out() -> None:
    keys, ends = there(torch.ones(2 * PAGE, 1, DIM)), there(torch.zeros(2, 1, 2 * DIM))
    select_triton.note_bounds(keys, there(torch.tensor([-1, -5, 2 * PAGE, 99])), ends, PAGE)
    select_triton.note_bounds(keys, there(torch.tensor([], dtype=torch.int64)), ends, PAGE)
    assert not ends.any()


class Rows:
    """Rows with evicted positions, ragged, some shorter than the budget, and one beyond the batch."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_slots, width = 400, 61
        self.pages = -(-width // PAGE)
        self.rows = torch.randint(0, self.num_slots, (6, width), generator=generator).int()
        evicted = torch.rand(6, width, generator=generator) < 0.2
        self.rows[evicted] = -1
        self.cached_at = torch.randint(0, width, (self.num_slots,), generator=generator).int()
        self.requests = torch.tensor([5, 0, 3, 1])
        self.lengths = torch.tensor([61, 7, 42, 1])
        self.asked = torch.rand(4, self.pages, generator=generator) < 0.4
        self.state = torch.randint(0, 3, (4, self.pages), generator=generator).to(torch.uint8)
        self.whole = PlanBuffers.of(5, 200, DEVICE, positions=True)
        arguments = (self.rows, self.requests, self.lengths, self.cached_at)
        plan_into(self.whole, *map(there, arguments), num_slots=self.num_slots)


@on_device
@pytest.mark.parametrize("budget", [0, 12, 61])
def test_pages_that_are_read(budget: int) -> None:
    rows = Rows(1)
    keep = there(torch.full(rows.state.shape, 7, dtype=torch.uint8))
    totals = there(torch.tensor([100, 200, 300]))
    select_triton.settle(
        there(rows.asked), there(rows.state), there(rows.lengths), keep, totals,
        budget=budget, page=PAGE,
    )  # fmt: skip
    held = read = missing = 0
    for i, length in enumerate(rows.lengths.tolist()):
        for page in range(rows.pages):
            size = min(PAGE, length - page * PAGE)
            found = int(keep[i, page])
            if size <= 0:
                assert found == 7
                continue
            kind, asked = int(rows.state[i, page]), bool(rows.asked[i, page])
            newest = page == (length - 1) // PAGE
            right = kind > 0 and (asked or kind == 2 or newest or length <= budget)
            assert found == right
            if length > budget and kind:
                held += size
                read += size * right
                missing += newest and not asked
    assert totals.tolist() == [100 + held, 200 + read, 300 + missing]


@on_device
@pytest.mark.parametrize("capacity", [200, 30])
def test_entries_of_kept_pages(capacity: int) -> None:
    """In their order, with shifts and places; what has no room is left out."""
    rows = Rows(2)
    chosen = PlanBuffers.of(5, capacity, DEVICE, positions=True)
    select_triton.select_into(chosen, rows.whole, there(rows.asked.to(torch.uint8)), PAGE)
    assert rows.whole.positions is not None and chosen.positions is not None
    whole_ends = rows.whole.kv_indptr.tolist()
    expected: list[int] = []
    ends = [0]
    for i in range(4):
        for entry in range(whole_ends[i], whole_ends[i + 1]):
            if rows.asked[i, int(rows.whole.positions[entry]) // PAGE]:
                expected.append(entry)
        ends.append(min(len(expected), capacity))
    assert capacity == 200 or len(expected) > capacity
    expected = expected[:capacity]
    assert chosen.kv_indptr.tolist()[:5] == ends
    entries = there(torch.tensor(expected))
    for name in ("kv_indices", "shift"):
        found = getattr(chosen, name)[: len(expected)]
        assert torch.equal(found, getattr(rows.whole, name)[entries])
    assert chosen.positions.tolist()[: len(expected)] == expected
    # Weights go back the same way, and leave zeros.
    weights = there(torch.arange(1.0, capacity + 1))
    weights[len(expected) :] = 0
    sums = there(torch.full((200,), 0.5))
    select_triton.add(weights, chosen, 4, sums)
    right = torch.full((200,), 0.5)
    right[expected] += torch.arange(1.0, len(expected) + 1)
    assert torch.equal(sums.cpu(), right)
    assert not weights.any()


@on_device
def test_selection_in_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a step: keys noted, pages laid out, Quest asked, entries selected; on a GPU captured
    in a CUDA graph, after the trial call. Rows, lengths and keys change between replays."""
    if INTERPRETED:
        monkeypatch.setattr(page_bounds, "PagedKv", functools.partial(PagedKv, backend="triton"))
    width, pages = 40, 40
    host_rows = torch.zeros(3, width, dtype=torch.int32)
    rows, keys = there(host_rows.clone()), there(torch.randn(pages * PAGE, HEADS, 16))
    rule = Quest(budget=2 * PAGE, whole_layers=0)
    selection = DeviceSelection("quest", rule, {0: keys}, PAGE, rows, None)
    requests, lengths = there(torch.tensor([2, 1])), there(torch.tensor([1, 1]))
    slots, query = there(torch.zeros(2, dtype=torch.int64)), there(torch.randn(2, 2 * HEADS, 16))
    buffers = PlanBuffers.of(2, 2 * width, DEVICE, positions=True)
    zero = requests[:1] * 0
    one = PlanBuffers.of(1, width, DEVICE, positions=True)
    plan_into(one, rows, zero, zero + width, num_slots=len(keys))
    selection.try_out(one, {0: query[:1]})
    selection.allocate_graphs(2, weighs=False)

    def step() -> RowPlan:
        plan_into(buffers, rows, requests, lengths, num_slots=len(keys))
        selection.begin_graph(BatchRows(buffers, requests, lengths, width))
        selection.update(0, slots)
        some = selection.plan(0, query, 0.25)
        assert some is not None
        return some[0]

    replay: Any = step
    if DEVICE == "cuda":
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan = step()

        def replay() -> RowPlan:
            graph.replay()
            return plan

    world = random.Random(5)
    for changed in ([37, 22], [9, 40], [7, 1]):
        named = world.sample(range(1, pages), 20)
        host_rows[1:] = (torch.tensor(named)[:, None] * PAGE + torch.arange(PAGE)).view(2, width)
        host_keys = torch.randn(pages * PAGE, HEADS, 16)
        host_lengths = torch.tensor(changed)
        newest = host_rows[[2, 1], host_lengths - 1].long()
        for target, source in (
            (rows, host_rows), (keys, host_keys), (lengths, host_lengths), (slots, newest),
            (query, torch.randn(query.shape)),
        ):  # fmt: skip
            target.copy_(source)
        selection.update(0, rows[1:].flatten())
        found = replay()
        ends = [0]
        expected: list[Any] = []
        for i, length in enumerate(changed):
            own = host_rows[2 - i : 3 - i]
            request, own_length = torch.tensor([0]), host_lengths[i : i + 1]
            host = selection_on_host(rule, {0: host_keys}, PAGE, own)
            host.update(0, own[0, :length])
            whole = plan_rows(own, request, own_length, num_slots=len(keys))
            host.begin(BatchRows(whole, request, own_length, length), False)
            some = host.plan(0, query[i : i + 1].cpu(), 0.25)
            expected += (whole if some is None else some[0]).kv_indices.tolist()
            ends.append(len(expected))
        assert found.kv_indptr.tolist() == ends
        assert found.kv_indices[: ends[-1]].tolist() == expected
    assert selection.describe()["refusals"] == {}
