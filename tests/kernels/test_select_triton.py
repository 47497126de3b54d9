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
from sglang_reasoncache.selection.page_selection import PageSelection
from sglang_reasoncache.selection.quest import Quest

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


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 12), (33, 1, 8), (2, 2, 130)])
def test_shares_are_those_of_dense_logits(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In launches of two rows; a row without pages has no shares, and what is out of range none."""
    monkeypatch.setattr(select_triton, "LOGITS_BYTES", 2 * 4 * heads * 19)
    query, ends = torch.randn(3, heads, dim), torch.randn(30, kv_heads, dim)
    query, ends = query.to(dtype), ends.to(dtype)
    pages = torch.randint(-3, 34, (3, 19))
    pages[1] = -1
    found = select_triton.page_shares(there(query), there(ends), there(pages), 0.4).cpu()
    read = (pages >= 0) & (pages < 30)
    keys = ends[pages.clamp(0, 29)].repeat_interleave(heads // kv_heads, dim=2).double()
    logits = torch.einsum("rhd,rphd->rhp", query.double(), keys) * 0.4
    expected = logits.masked_fill(~read[:, None], -torch.inf).softmax(dim=2).sum(dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5, equal_nan=True)


@on_device
@pytest.mark.parametrize("shifted", [True, False])
def test_entries_of_pages_are_copied(shifted: bool) -> None:
    """Pages with evicted ones between them, short last ones, a row without any."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([61, 7, 42, 0])
    sizes = (lengths[:, None] - torch.arange(16) * PAGE).clamp(0, PAGE)
    sizes[torch.rand(sizes.shape, generator=generator) < 0.2] = 0
    keep = torch.rand(sizes.shape, generator=generator) < 0.4
    keep[1] = sizes[1] > 0
    read, total = sizes * keep, int(sizes.sum())
    whole = PlanBuffers.of(4, total + 9, DEVICE)
    assert whole.shift is not None
    for side in (whole.kv_indices, whole.shift):
        side.copy_(torch.randint(-500, 500, (total + 9,), generator=generator))
    pages = there(read), there(sizes)
    indices, shift = select_triton.copy_pages(*pages, PAGE, whole, shifted=shifted)
    among = keep.flatten().repeat_interleave(sizes.flatten())
    count = int(among.sum())
    assert 0 < count < total
    entries = there(among.nonzero()[:, 0])
    assert torch.equal(indices[:count], whole.kv_indices[entries])
    assert (shift is not None) == shifted
    assert shift is None or torch.equal(shift[:count], whole.shift[entries])


@on_device
def test_selection_in_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a step: keys noted, pages laid out, Quest asked, entries copied; on a GPU captured
    in a CUDA graph. Rows, lengths and keys change between replays."""
    if INTERPRETED:
        monkeypatch.setattr(page_bounds, "PagedKv", functools.partial(PagedKv, backend="triton"))
    width, pages = 40, 40
    host_rows = torch.zeros(3, width, dtype=torch.int32)
    rows, keys = there(host_rows.clone()), there(torch.randn(pages * PAGE, HEADS, 16))
    rule = Quest(budget=2 * PAGE, whole_layers=0)
    selection = PageSelection(rule, {0: keys}, PAGE, rows, None)
    requests, lengths = there(torch.tensor([2, 1])), there(torch.tensor([1, 1]))
    slots, query = there(torch.zeros(2, dtype=torch.int64)), there(torch.randn(2, 2 * HEADS, 16))
    buffers = PlanBuffers.of(2, 2 * width, DEVICE)
    zero = requests[:1] * 0
    one = PlanBuffers.of(1, width, DEVICE)
    plan_into(one, rows, zero, zero + width, num_slots=len(keys))
    selection.warm_up(one, {0: query[:1]})

    def step() -> RowPlan:
        plan_into(buffers, rows, requests, lengths, num_slots=len(keys))
        selection.begin(BatchRows(buffers, requests, lengths, width))
        selection.update(0, slots)
        some = selection.plan(0, query, 0.25)
        assert some is not None
        return some

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
            host.begin(BatchRows(whole, request, own_length, length))
            some = host.plan(0, query[i : i + 1].cpu(), 0.25)
            expected += (whole if some is None else some).kv_indices.tolist()
            ends.append(len(expected))
        assert found.kv_indptr.tolist() == ends
        assert found.kv_indices[: ends[-1]].tolist() == expected
