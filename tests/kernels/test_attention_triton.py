# SPDX-License-Identifier: Apache-2.0
"""What Triton's kernels alone do, on a GPU or interpreted beside ``test_attention.py``, which has what
attention shares with the other backends."""

import random

import pytest
import torch

from sglang_reasoncache.kernels.extend import gather_kv
from sglang_reasoncache.kernels.row_plan import RowPlan
from tests.kernels.attention_cases import TABLE, Case, assert_attention, assert_plans, make
from tests.kernels.test_attention import cut, decode, kv_of, placed
from tests.triton_runs import DEVICE, INTERPRETED, on_device, there
from tests.triton_runs import small_launches as small_launches

pytest.importorskip("triton")

import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton, decode_triton, plan_triton, select_triton
from sglang_reasoncache.selection import page_bounds

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@triton.jit
def decode_kernel(codes, out, ELEMENT: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out + at, common_triton.load_fp32(codes + at, at < 256, ELEMENT))


@on_device
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_reads_every_byte_exactly(dtype: torch.dtype) -> None:
    """fp8 is decoded by arithmetic; subnormals and NaN included."""
    codes = torch.arange(256).to(torch.uint8)
    out = torch.empty(256, device=DEVICE)
    decode_kernel[(1,)](codes.to(DEVICE), out, ELEMENT=common_triton.ELEMENT[dtype])
    expected = codes.view(dtype).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@on_device
@pytest.mark.parametrize("splits", [1, 2, 64])
def test_the_merge_is_exact(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(Case((989, 600, 19, 0), 2, 1, dtype=torch.float16, query_dtype=torch.float32))
    rig.query *= 4
    plan = rig.plan()
    whole = decode(rig, "triton", plan)
    monkeypatch.setattr(decode_triton, "SPLITS", splits)
    out = decode(rig, "triton", plan)
    # The same entries, summed in another order. A tensor core cuts each sum of 16 products to fp32,
    # once for either half of a weight: 989 / 8 times up to 2**-23 of values of about 1.
    atol = 1e-6 if INTERPRETED else 989 / 8 * 2.0**-23
    torch.testing.assert_close(out, whole, rtol=0, atol=atol)
    # Up to one chunk of entries nothing is cut, whatever the splits.
    assert torch.equal(out[2:], whole[2:])


@on_device
@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_indices", n) for n in (-1, 2**31 - 1)]
    + [("shift", n) for n in (TABLE, -TABLE, -(2**31))],
)
def test_entries_out_of_range_count_for_nothing(name: str, value: int) -> None:
    """The host reads no values before a launch."""
    rig = make(Case(lengths=(19, 70, 1)))
    plan = rig.plan()
    assert plan.shift is not None
    kept = torch.ones(len(plan.kv_indices), dtype=torch.bool)
    kept[[5, 30, 89]] = False
    indptr = torch.tensor([0, 18, 87, 87], dtype=torch.int32)
    left = RowPlan(indptr, plan.kv_indices[kept], plan.shift[kept])
    getattr(plan, name)[~kept] = value
    out = decode(rig, "triton", plan)
    assert_attention(out, rig.expected(left)[0])
    assert not out[2].any()
    entries = placed(plan, "triton")
    for side in gather_kv(kv_of(rig, "triton"), entries.kv_indices, entries.shift, torch.float32):
        assert not side[:, ~kept].any() and side[:, kept].any(dim=2).all()


@on_device
def test_spans_are_cut_to_the_entries() -> None:
    rig = make(Case(lengths=(19, 70)))
    plan = rig.plan()
    begin, end = torch.tensor([[-5, 19], [19, 2**31 - 1]], dtype=torch.int32)
    out = decode(rig, "triton", plan, spans=(begin, end))
    assert torch.equal(out, decode(rig, "triton", plan))
    assert not decode(rig, "triton", plan, spans=(begin + 200, begin)).any()


@on_device
@pytest.mark.parametrize("by", [TABLE, -TABLE, -(2**31)])
def test_rotations_out_of_range_count_for_nothing(by: int) -> None:
    rig = make(Case(lengths=(19, 150), repeated=0.4))
    plan = rig.plan(merge=True)
    assert plan.rotations is not None
    plan.rotations.bits[:2] = 0
    out = decode(rig, "triton", plan)
    plan.rotations.bits[:2] = -1
    plan.rotations.by[:2] = by
    assert torch.equal(decode(rig, "triton", plan), out)


@on_device
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_plan_into_buffers_of_any_content(dtype: torch.dtype, merge: bool) -> None:
    """Of more requests than are planned; what is out of range yields nothing."""
    rig = make(Case(lengths=(30, 989, 19, 600, 7), shared=0.3, repeated=0.3, evicted=0.3))
    num_slots = rig.keys.shape[0]
    rows = rig.rows.clone()
    requests, lengths = rig.requests.to(dtype, copy=True), rig.lengths.to(dtype, copy=True)
    # Requests 0 and 4 cannot be read; in request 1 two entries cannot.
    rows[rig.requests[1], :2] = torch.tensor([num_slots, 2**31 - 1], dtype=torch.int32)
    requests[0], lengths[4] = len(rows), -1
    rig.rows[rig.requests[1], :2] = -1
    rig.lengths[0] = rig.lengths[4] = 0
    expected = rig.plan(merge)
    assert (expected.rotations is not None) == merge
    total = int(expected.kv_indptr[-1])
    for capacity in (2 * total, total, 100, 0):
        buffers = plan_triton.PlanBuffers.of(9, capacity, DEVICE, merge=merge)
        own = buffers.merge or ()
        for side in (*vars(buffers).values(), *own[1:], *(own and own[0])):
            if isinstance(side, torch.Tensor):
                side[1:] = -7  # the first of an indptr is nobody's to write
        tensors = map(there, (rows, requests, lengths, rig.cached_at))
        plan = plan_triton.plan_into(buffers, *tensors, num_slots=num_slots)
        if capacity == 2 * total:
            assert_plans(cut(plan), expected)
        if expected.shift is not None:
            assert plan.shift is not None
            found = RowPlan(plan.kv_indptr, plan.kv_indices[:total], plan.shift[:total])
            sides = expected.kv_indices[:capacity], expected.shift[:capacity]
            assert_plans(found, RowPlan(expected.kv_indptr.clamp(max=capacity), *sides))
        if not merge or capacity > total:
            assert (buffers.kv_indptr[6:] == -7).all() and (plan.kv_indices[total:] == -7).all()


@on_device
def test_plans_that_do_not_fit_are_refused() -> None:
    rig = make(Case(lengths=(5, 6)))
    rows, *ints = (there(side) for side in (rig.rows, rig.requests, rig.lengths))
    for requests, some, message in (
        (1, rows, "2 requests, the buffers are for 1"),
        (2, rows.T.contiguous().T, "side by side"),
    ):
        buffers = plan_triton.PlanBuffers.of(requests, 10, DEVICE)
        with pytest.raises(ValueError, match=message):
            plan_triton.plan_into(buffers, some, *ints, num_slots=99)


# -- pages, and bounds of their keys ------------------------------------------------

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
