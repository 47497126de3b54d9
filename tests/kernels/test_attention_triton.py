# SPDX-License-Identifier: Apache-2.0
"""Tests for the Triton kernels only. They run on a GPU, or under Triton's interpreter in one process with
``test_attention.py``, which tests all backends."""

import pytest
import torch

from sglang_reasoncache.attention.verification import one_by_one, window_entries
from sglang_reasoncache.kernels.extend import gather_kv
from sglang_reasoncache.kernels.row_plan import RowPlan
from tests.kernels.attention_cases import TABLE, Case, assert_attention, assert_plans, make
from tests.kernels.test_attention import cut, decode, kv_of, placed, plan_of
from tests.triton_runs import DEVICE, INTERPRETED, on_device, there
from tests.triton_runs import small_launches as small_launches

pytest.importorskip("triton")

from sglang_reasoncache.kernels import decode_triton, plan_triton, tile_triton

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(params=[False, True], ids=["of 32 lines", "of 64 lines"])
def wide(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the GPU multiplies 64 lines at once. Interpreted, it does as the test says."""
    here = tile_triton.multiplies_wide()
    if INTERPRETED:
        monkeypatch.setattr(tile_triton, "multiplies_wide", lambda: request.param)
    elif here != request.param:
        pytest.skip("needs another GPU")
    return bool(request.param)


@on_device
@pytest.mark.parametrize(
    ("heads", "v_dim"),
    [(16, 64), (20, 40), (32, 64), (40, 64), (64, 64), (96, 40), (128, 64), (128, 512)],
)
@pytest.mark.parametrize("shared", [0.0, 0.1])
def test_heads_of_a_latent(wide: bool, heads: int, v_dim: int, shared: float) -> None:
    """Heads beyond a program's lines are another program's. Lines beyond the last head are not stored."""
    case = Case((70,), shared=shared, repeated=5 * shared).latent(heads=heads, v_dim=v_dim)
    rig = make(case)
    constants = decode_triton.constants(rig.query, rig.keys, rig.values, None, latent=True)
    lines = {16: 16, 20: 32, 32: 32}.get(heads, 64 if wide else 32)
    assert (constants["HEADS"], constants["GROUP"]) == (lines, heads)
    plan = plan_of(rig, "triton")
    merged = plan_of(rig, "triton", merge=True)
    assert (plan.shift is not None) == (merged.rotations is not None) == (shared > 0)
    expected = rig.expected(plan)
    for each in (plan, merged):
        assert_attention(decode(rig, "triton", each), expected)


@on_device
@pytest.mark.parametrize("splits", [1, 2, 64])
def test_the_merge_is_exact(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(Case((989, 600, 19, 0), 2, 1, dtype=torch.float16, query_dtype=torch.float32))
    rig.query *= 4
    plan = rig.plan()
    whole = decode(rig, "triton", plan)
    monkeypatch.setattr(decode_triton, "SPLITS", splits)
    out = decode(rig, "triton", plan)
    # ``SPLITS`` changes only the order of additions. A tensor core truncates each sum of 16 products to fp32.
    # Each attention weight is split into two fp16 numbers, so 2 * 989 / 16 sums of about 1 lose up to 2**-23.
    atol = 1e-6 if INTERPRETED else 989 / 8 * 2.0**-23
    torch.testing.assert_close(out, whole, rtol=0, atol=atol)
    # The last two requests have fewer than ``CHUNK`` entries, so they are not split.
    assert torch.equal(out[2:], whole[2:])


@on_device
@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_indices", n) for n in (-1, 2**31 - 1)]
    + [("shift", n) for n in (TABLE, -TABLE, -(2**31))],
)
def test_entries_out_of_range_count_for_nothing(name: str, value: int) -> None:
    """The host does not check values before a launch, so kernels must ignore entries out of range."""
    rig = make(Case(lengths=(19, 70, 1)))
    plan = rig.plan()
    assert plan.shift is not None
    kept = torch.ones(len(plan.kv_indices), dtype=torch.bool)
    kept[[5, 30, 89]] = False
    indptr = torch.tensor([0, 18, 87, 87], dtype=torch.int32)
    left = RowPlan(indptr, plan.kv_indices[kept], plan.shift[kept])
    getattr(plan, name)[~kept] = value
    out = decode(rig, "triton", plan)
    assert_attention(out, rig.expected(left))
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
    """Buffers hold old values and have room for more requests. Values out of range add no plan entries."""
    rig = make(Case(lengths=(30, 989, 19, 600, 7), shared=0.3, repeated=0.3, evicted=0.3))
    num_slots = rig.keys.shape[0]
    rows = rig.rows.clone()
    requests = rig.requests.to(dtype, copy=True)
    lengths = rig.lengths.to(dtype, copy=True)
    # Request 0 has a row out of range, request 4 a length below 0, and request 1 two slots out of range.
    rows[rig.requests[1], :2] = torch.tensor([num_slots, 2**31 - 1], dtype=torch.int32)
    requests[0] = len(rows)
    lengths[4] = -1
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
                side[1:] = -7  # ``kv_indptr[0]`` must stay 0, because planning never writes it
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


@on_device
@pytest.mark.parametrize(
    ("case", "new", "tree"),
    [
        (Case(lengths=(5, 70, 300), shared=0.1, repeated=0.4), 4, False),
        (Case((64, 150), 6, 2, shared=0.3, repeated=2.0, evicted=0.1), 5, True),
        (Case(lengths=(5, 150), heads=32, kv_heads=2), 4, False),
        (Case(lengths=(70,), heads=3, kv_heads=3, rotary_dim=0, shared=0.0), 2, False),
        (Case((20, 150), shared=0.1, repeated=0.4).latent(heads=8), 3, True),
    ],
    ids=str,
)
def test_queries_of_drafted_tokens(
    case: Case, new: int, tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _test_drafted_tokens(case, new, tree, monkeypatch)


@on_device
def test_queries_of_drafted_tokens_over_latents(
    wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of all queries of a row are lines: 80 and 120 of them, of which a program takes up to 64."""
    for heads, new, tree in ((20, 4, False), (40, 3, True)):
        case = Case((20, 90), shared=0.1, repeated=0.8).latent(heads=heads, v_dim=64)
        _test_drafted_tokens(case, new, tree, monkeypatch)


@on_device
@pytest.mark.parametrize(
    ("case", "new", "tree", "reach"),
    [
        (Case(lengths=(5, 70, 300), shared=0.1, repeated=0.4), 4, False, 40),
        (Case(lengths=(38, 41, 64, 700), heads=6, kv_heads=2, shared=0.2), 7, True, 40),
        (Case(lengths=(150, 20), heads=8, kv_heads=1, rotary_dim=0, shared=0.0), 4, False, 130),
    ],
    ids=str,
)
def test_queries_of_drafted_tokens_see_windows(
    case: Case, new: int, tree: bool, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows shorter than a window, as long as one, and longer: a query sees the last positions up to its own."""
    _test_drafted_tokens(case, new, tree, monkeypatch, reach)


def _test_drafted_tokens(
    case: Case, new: int, tree: bool, monkeypatch: pytest.MonkeyPatch, reach: int = 0
) -> None:
    """Each query of a request sees its prefix and the new entries that its word names: in a chain all up to its
    own, in a tree its ancestors. The reference is dense attention over the entries of each query by itself."""
    monkeypatch.setattr(decode_triton, "QUERIES", 2)
    rig = make(case)
    rig.rows = torch.cat((rig.rows, rig.rows[:, :new]), dim=1)
    used = rig.lengths.tolist()
    rows = [
        rig.rows[request, :n].tolist()
        for request, n in zip(rig.requests.tolist(), used, strict=True)
    ]
    taken = {slot for row in rows for slot in row}
    spare = [slot for slot in range(1, len(rig.keys)) if slot not in taken][: len(used) * new]
    order = torch.tensor(spare)
    for i, (request, length) in enumerate(zip(rig.requests.tolist(), used, strict=True)):
        slots = order[i * new : (i + 1) * new]
        rig.rows[request, length : length + new] = slots.int()
        rig.cached_at[slots] = torch.arange(length, length + new, dtype=torch.int32)
        generator = torch.Generator().manual_seed(i)
        for buffer in (rig.keys, rig.values):
            shape = (new, *buffer.shape[1:])
            buffer[slots] = torch.randn(shape, generator=generator).to(buffer.dtype)
    rig.lengths += new
    own = torch.arange(new)
    sees = (torch.ones(len(used), new, dtype=torch.int64) << (own + 1)) - 1
    if tree:  # the parent of node i is node (i - 1) // 2
        for i in range(new):
            sees[:, i] = 1 << i | (sees[:, (i - 1) // 2] if i else 0)
    shape = (len(used) * new, case.heads, case.query_dim)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(case.query_dtype)
    whole = plan_of(rig, "triton")
    indptr = [0]
    entries = []
    for b, words in enumerate(sees.tolist()):
        begin, end = whole.kv_indptr[b : b + 2].tolist()
        for word in words:
            seen = [end - new + i for i in range(new) if word >> i & 1]
            first = max(begin, end - new + len(seen) - reach) if reach else begin
            entries += [*range(first, end - new), *seen]
            indptr.append(len(entries))
    at = torch.tensor(entries)
    alone = RowPlan(
        torch.tensor(indptr).int(),
        whole.kv_indices[at],
        None if whole.shift is None else whole.shift[at],
    )
    expected = rig.expected(alone, query=query)
    if reach:
        plans = [plan_of(rig, "triton", reach=window_entries(reach, new))]
    else:
        plans = [whole, plan_of(rig, "triton", merge=True)]
    for plan in plans:
        found = decode(rig, "triton", plan, query=query, sees=sees, reach=reach)
        assert_attention(found, expected)
    if reach:
        # As on a CPU, where each token has a plan of its own.
        one = one_by_one(plan_of(rig, "native", reach=window_entries(reach, new)), sees, reach)
        assert one.kv_indices.tolist() == alone.kv_indices.tolist()
