# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of paged attention: on a GPU if there is one, interpreted, compiled for three."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan, plan_rows
from sglang_reasoncache.kernels.row_order import RowOrder
from tests.kernels.ahead_of_time import NAMES, STRIDES, compile_for
from tests.kernels.attention_cases import (
    CASES,
    TABLE,
    TOLERANCE,
    Case,
    Rig,
    assert_plans,
    expected_weights,
    make,
    repeating,
)
from tests.triton_runs import (
    DEVICE,
    INTERPRETED,
    on_device,
    run_interpreted,
    starts_interpreter,
    there,
)

pytest.importorskip("triton")


from sglang_reasoncache.kernels import (
    decode_triton,
    gather_triton,
    note_triton,
    plan_triton,
    weights_triton,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes 10 ms even for one that has nothing to do."""
    if INTERPRETED:
        monkeypatch.setattr(decode_triton, "SPLITS", 4)
        monkeypatch.setattr(plan_triton, "PIECES", 4)
        monkeypatch.setattr(weights_triton, "PIECES", 4)


@starts_interpreter
def test_interpreted() -> None:
    run_interpreted(__file__)


def kv_of(rig: Rig) -> PagedKv:
    kv = PagedKv(there(rig.keys), there(rig.values), rig.rotation, backend="triton")
    assert kv.backend == "triton"
    return kv


def moved_to_device(plan: RowPlan) -> RowPlan:
    shift = None if plan.shift is None else there(plan.shift)
    return RowPlan(there(plan.kv_indptr), there(plan.kv_indices), shift)


def decode(
    rig: Rig,
    plan: RowPlan,
    *,
    query: torch.Tensor | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp, on the host."""
    query = there(rig.query if query is None else query)
    lse = torch.empty(query.shape[:2], device=DEVICE)
    out = decode_attention(
        query,
        kv_of(rig),
        moved_to_device(plan),
        scale=rig.scale,
        logit_cap=cap,
        sinks=None if sinks is None else there(sinks),
        spans=None if spans is None else (there(spans[0]), there(spans[1])),
        lse=lse,
    )
    return out.cpu(), lse.cpu()


def plan_of(rig: Rig, **changed: Any) -> RowPlan:
    """Planned on the device, looked at on the host; ``changed`` replaces arguments."""
    arguments: dict[str, Any] = dict(
        rows=rig.rows, requests=rig.requests, lengths=rig.lengths, cached_at=rig.cached_at
    )
    arguments |= dict(num_slots=rig.keys.shape[0], backend="triton") | changed
    tensors = {k: there(v) for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    plan = plan_rows(**arguments | tensors)
    shift = None if plan.shift is None else plan.shift.cpu()
    return RowPlan(plan.kv_indptr.cpu(), plan.kv_indices.cpu(), shift)


def assert_attention(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the tolerance of the result's dtype; the interpreter cuts bf16, a GPU rounds."""
    relative, absolute = TOLERANCE[found.dtype]
    if INTERPRETED and found.dtype == torch.bfloat16:
        relative *= 2
    torch.testing.assert_close(found.double(), expected, rtol=relative, atol=absolute)


def assert_lse(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As for the CPU; fp32 as the sum of two bf16 is cut twice by the interpreter."""
    absolute = 5e-5 if INTERPRETED else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=absolute)


_FEW = [
    Case(evicted=0.4),
    Case(heads=5, kv_heads=1, k_dim=80, v_dim=80, rotary_dim=80, lengths=(1, 70)),
    Case(heads=40, kv_heads=2, lengths=(19,)),
    Case(k_dim=96, v_dim=40, rotary_dim=80, is_neox=False, lengths=(1, 300)),
    Case(k_dim=128, v_dim=128, rotary_dim=32, lengths=(70,), query_dtype=torch.float32),
    Case(k_dim=192, v_dim=128, rotary_dim=64, lengths=(70,)),
    Case(k_dim=256, v_dim=256, rotary_dim=256, is_neox=False, lengths=(70,)),
    Case(k_dim=8, v_dim=8, rotary_dim=8, lengths=(70,)),
    Case(rotary_dim=0, shared=0.0, lengths=(0, 1, 300)),
    Case(shared=1.0, lengths=(300,), dtype=torch.float16, query_dtype=torch.float16),
    Case(dtype=torch.float32, query_dtype=torch.float32, lengths=(1, 300), layout="gaps"),
    Case(dtype=torch.float8_e4m3fn, lengths=(150,), layout="slot"),
    Case(dtype=torch.float8_e5m2, lengths=(150,), query_dtype=torch.float16, layout="odd"),
    Case(lengths=()),
]


@on_device
@pytest.mark.parametrize("case", _FEW if INTERPRETED else [*CASES, *_FEW], ids=str)
def test_agrees_with_dense_attention(case: Case) -> None:
    rig = make(case)
    plan = plan_of(rig)
    assert_plans(plan, rig.plan())
    out, lse = decode(rig, plan)
    expected, expected_lse = rig.expected(plan)
    assert_attention(out, expected)
    assert_lse(lse, expected_lse)


#: Shifts of the entries of one tile, repeated.
TILES = {
    "unshifted": [0],
    "one": [7],
    "one and none": [0, 0, -300],
    "two": [5, -9, 0],
    "many": [5, -9, 0, 300, 1, -1, TABLE - 1],
}


@on_device
@pytest.mark.parametrize("shifts", TILES.values(), ids=TILES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_sort_of_tile(shifts: list[int], is_neox: bool, dtype: torch.dtype) -> None:
    case = Case(lengths=(3, 200), heads=2, kv_heads=1, is_neox=is_neox, shared=0.0, dtype=dtype)
    rig = make(dataclasses.replace(case, query_dtype=torch.float32))
    plan = rig.plan()
    shifted = torch.tensor(shifts * 203, dtype=torch.int32)[:203]
    shifted[:3] = 0
    plan = plan._replace(shift=shifted)
    out, lse = decode(rig, plan)
    expected, expected_lse = rig.expected(plan)
    assert_attention(out, expected)
    assert_lse(lse, expected_lse)
    # What another request shares leaves no trace.
    alone = rig.query[:1]
    indptr, indices = plan.kv_indptr[:2], plan.kv_indices[:3]
    assert torch.equal(out[:1], decode(rig, RowPlan(indptr, indices, None), query=alone)[0])


@on_device
@pytest.mark.parametrize("splits", [1, 2, 64])
def test_the_merge_is_exact(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Case(dtype=torch.float16, query_dtype=torch.float32)
    rig = make(dataclasses.replace(halves, lengths=(989, 600, 19, 0), kv_heads=1, heads=2))
    rig.query *= 4
    plan = rig.plan()
    whole, whole_lse = decode(rig, plan)
    call = decode_triton.decode
    monkeypatch.setattr(
        decode_triton, "decode", lambda *args, **more: call(*args, splits=splits, **more)
    )
    out, lse = decode(rig, plan)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    # Up to one chunk of entries nothing is cut, whatever the splits.
    assert torch.equal(out[2:], whole[2:]) and torch.equal(lse[2:], whole_lse[2:])


@on_device
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_cap_and_sinks(cap: float, with_sinks: bool) -> None:
    halves = Case(dtype=torch.float16, query_dtype=torch.float32)
    rig = make(dataclasses.replace(halves, heads=6, lengths=(0, 1, 19, 300)))
    rig.query *= 8
    sinks = torch.linspace(-2, 6, 6) if with_sinks else None
    plan = rig.plan()
    out, lse = decode(rig, plan, cap=cap, sinks=sinks)
    expected, expected_lse = rig.expected(plan, cap=cap, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-4)


@on_device
def test_several_queries_may_read_the_same_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """In launches of at most three queries here."""
    monkeypatch.setattr(decode_triton, "QUERIES", 3)
    rig = make(Case(lengths=(300, 19), query_dtype=torch.float32))
    plan = rig.plan()
    sides = (0, 0, 5, 300, 7, 1, 299), (300, 299, 5, 301, 50, 2, 319)
    begin, end = (torch.tensor(side, dtype=torch.int32) for side in sides)
    query = rig.query[[0, 0, 1, 1, 0, 1, 0]]
    out, lse = decode(rig, plan, query=query, spans=(begin, end))
    expected, expected_lse = rig.expected(plan, (begin, end), query)
    assert_attention(out, expected)
    assert_lse(lse, expected_lse)


def weights_of(
    rig: Rig, plan: RowPlan, room: int, *, longest: int | None = None, **options: Any
) -> torch.Tensor:
    """Of a call whose output and log-sum-exp are those of one without, bit for bit."""
    rest: dict[str, Any] = {
        k: there(v) if isinstance(v, torch.Tensor) else v for k, v in options.items()
    }
    if "spans" in rest:
        rest["spans"] = tuple(map(there, rest["spans"]))
    query = rest.pop("query", there(rig.query))
    weights = torch.ones(room, device=DEVICE)
    noted: dict[str, Any] = dict(weights=weights, longest=longest)
    found = [
        decode_attention(query, kv_of(rig), moved_to_device(plan), scale=rig.scale, **rest, **more)
        for more in ({}, noted)
    ]
    assert torch.equal(*found)
    return weights.cpu() - 1


@on_device
@pytest.mark.parametrize("case", _FEW[:5] if INTERPRETED else [*CASES, *_FEW], ids=str)
def test_weights(case: Case) -> None:
    """Added to what is there; what the vector has besides stays."""
    rig = make(case)
    plan = rig.plan()
    entries = len(plan.kv_indices)
    found = weights_of(rig, plan, entries + 9, longest=max(case.lengths, default=0))
    torch.testing.assert_close(
        found[:entries].double(), expected_weights(rig, plan), rtol=1e-3, atol=2e-5
    )
    assert not found[entries:].any()


@on_device
@pytest.mark.parametrize("launch", [1, 2, 100])
def test_weights_of_queries_over_the_same_entries(
    launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a soft cap and sinks, in launches that have memory for some logits."""
    rig = make(Case(lengths=(300, 19), heads=6, query_dtype=torch.float32))
    monkeypatch.setattr(weights_triton, "LOGITS_BYTES", launch * 4 * 6 * 300)
    plan = rig.plan()
    spans = tuple(torch.tensor(side).int() for side in ((0, 0, 300, 7, 7), (300, 299, 319, 7, 50)))
    query = rig.query[[0, 0, 1, 1, 0]]
    more: dict[str, Any] = dict(spans=spans, query=query, sinks=torch.linspace(-2, 3, 6))
    right = expected_weights(rig, plan, cap=3.0, **more)
    found = weights_of(rig, plan, len(right), longest=300, logit_cap=3.0, **more)
    torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=2e-5)
    # Beyond the room for weights, or for logits, they are left out.
    short = weights_of(rig, plan, 310, longest=300, logit_cap=3.0, **more)
    torch.testing.assert_close(short, found[:310])
    narrow = weights_of(rig, plan, 300, longest=20, logit_cap=3.0, **more)
    torch.testing.assert_close(narrow[:20], found[:20])
    assert not narrow[20:].any()


@pytest.mark.skipif(INTERPRETED, reason="no kernel runs")
def test_launches_begin_at_aligned_addresses() -> None:
    """What is compiled for the first launch serves the others."""
    for width in range(1, 600_000, 997):
        rows = weights_triton.rows_of_a_launch(32, width)
        assert rows % 4 == 0 or rows < 4
        assert rows < 4 or rows * 4 * 32 * width <= weights_triton.LOGITS_BYTES
    # As long as a context of 128k: no launch for the last of 16 requests alone.
    assert weights_triton.rows_of_a_launch(32, (128 << 10) + 4) == 16
    assert weights_triton.rows_of_a_launch(128, 10 << 20) == 1


@on_device
def test_weights_of_whole_rows_take_our_launches_only() -> None:
    """Every layer of a decode step pays for each launch."""
    rig = make(Case(lengths=(19, 7)))
    plan, kv, query = moved_to_device(rig.plan()), kv_of(rig), there(rig.query)
    noted = dict(weights=torch.zeros(26, device=DEVICE), out=torch.empty_like(query), longest=19)
    with Launches() as found:
        decode_attention(query, kv, plan, scale=rig.scale, **noted)  # type: ignore[arg-type]
    # The last two are the interpreter's own.
    assert found.names <= {"empty", "new_empty", "slice", "set_", "copy_"}


class Launches(TorchDispatchMode):
    """Which of PyTorch's operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@on_device
def test_weights_of_entries_out_of_range() -> None:
    rig = make(Case(lengths=(19, 70, 1)))
    plan = rig.plan()
    kept = torch.ones(len(plan.kv_indices), dtype=torch.bool)
    kept[[5, 30, 89]] = False
    right = expected_weights(
        rig,
        RowPlan(
            torch.tensor([0, 18, 87, 87], dtype=torch.int32),
            plan.kv_indices[kept],
            None if plan.shift is None else plan.shift[kept],
        ),
    )
    plan.kv_indices[~kept] = -1
    found = weights_of(rig, plan, 90)
    torch.testing.assert_close(found[kept].double(), right, rtol=1e-3, atol=2e-5)
    assert not found[~kept].any()


@on_device
def test_queries_and_outputs_may_be_strided() -> None:
    """SGLang hands out a slice of the fused projection."""
    rig = make(Case(lengths=(19, 70)))
    plan = rig.plan()
    expected, _ = decode(rig, plan)
    batch, heads, dim = rig.query.shape
    wide = torch.full((batch, heads + 3, dim + 8), float("nan"), dtype=rig.query.dtype)
    wide[:, 1 : heads + 1, 8:] = rig.query
    room = torch.zeros((batch, heads + 1, dim + 4), dtype=rig.query.dtype, device=DEVICE)
    decode_attention(
        there(wide)[:, 1 : heads + 1, 8:],
        kv_of(rig),
        moved_to_device(plan),
        scale=rig.scale,
        out=room[:, :heads, :dim],
    )
    assert torch.equal(room[:, :heads, :dim].cpu(), expected)
    assert not room[:, heads:].any() and not room[:, :, dim:].any()


@on_device
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_where_it_is_read(side: str, value: float) -> None:
    rig = make(Case(lengths=(300, 19, 1)))
    plan = rig.plan()
    sound, _ = decode(rig, plan)
    assert sound.isfinite().all()
    getattr(rig, side)[int(plan.kv_indices[200]), 1, -1] = value
    out, _ = decode(rig, plan)
    assert not out[0, 2:].isfinite().all()
    assert torch.equal(out[0, :2], sound[0, :2])
    assert torch.equal(out[1:], sound[1:])


@on_device
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_indices", -1),
        ("kv_indices", 2**31 - 1),
        ("shift", TABLE),
        ("shift", -TABLE),
        ("shift", -(2**31)),
    ],
)
def test_entries_out_of_range_count_for_nothing(name: str, value: int) -> None:
    """No look at values before a launch."""
    rig = make(Case(lengths=(19, 70, 1)))
    plan = rig.plan()
    assert plan.shift is not None
    kept = torch.ones(len(plan.kv_indices), dtype=torch.bool)
    kept[[5, 30, 89]] = False
    indptr = torch.tensor([0, 18, 87, 87], dtype=torch.int32)
    expected = rig.expected(RowPlan(indptr, plan.kv_indices[kept], plan.shift[kept]))[0]
    getattr(plan, name)[~kept] = value
    out, lse = decode(rig, plan)
    assert_attention(out, expected)
    assert lse[2].isneginf().all() and not out[2].any()
    entries = moved_to_device(plan)
    found = gather_kv(kv_of(rig), entries.kv_indices, entries.shift, torch.float32)
    for found_side in found:
        assert not found_side[:, ~kept].any() and found_side[:, kept].any(dim=2).all()


@on_device
def test_spans_are_cut_to_the_entries() -> None:
    rig = make(Case(lengths=(19, 70)))
    plan = rig.plan()
    expected, _ = decode(rig, plan)
    begin = torch.tensor([-5, 19], dtype=torch.int32)
    out, _ = decode(rig, plan, spans=(begin, torch.tensor([19, 2**31 - 1], dtype=torch.int32)))
    assert torch.equal(out, expected)
    out, _ = decode(rig, plan, spans=(begin + 200, begin))
    assert not out.any()


@on_device
@pytest.mark.parametrize("case", _FEW[:-1] if INTERPRETED else CASES, ids=str)
def test_gather_agrees_with_indexing(case: Case) -> None:
    rig = make(case)
    plan = rig.plan()
    kv, entries = kv_of(rig), moved_to_device(plan)
    # Narrower than the pool, the interpreter would cut what a GPU rounds.
    for dtype in dict.fromkeys(
        (case.query_dtype, torch.float16 if INTERPRETED else torch.bfloat16)
    ):
        out_k, out_v = (
            side.cpu() for side in gather_kv(kv, entries.kv_indices, entries.shift, dtype)
        )
        assert out_k.is_contiguous() and out_v.is_contiguous()
        assert_attention(out_k, rig.rotated(plan).transpose(0, 1))
        values = rig.values.float()[plan.kv_indices.long()].transpose(0, 1)
        assert torch.equal(out_v, values.to(dtype))
        stays = plan.kv_indices >= 0 if plan.shift is None else plan.shift == 0
        cached = rig.keys.float()[plan.kv_indices.long()].transpose(0, 1)
        assert torch.equal(out_k[:, stays], cached[:, stays].to(dtype))


@on_device
@pytest.mark.parametrize(
    ("window", "lengths_dtype"),
    [(None, torch.int32), (1, torch.int64), (19, torch.int32), (5000, torch.int64)],
    ids=str,
)
def test_plan(window: int | None, lengths_dtype: torch.dtype) -> None:
    rig = make(Case(lengths=(0, 1, 19, 1300), evicted=0.3))
    found = plan_of(rig, window=window, lengths=rig.lengths.to(lengths_dtype))
    assert_plans(found, rig.plan(window))
    unshifted = plan_of(rig, window=window, cached_at=None)
    assert unshifted.shift is None
    assert torch.equal(unshifted.kv_indices, rig.plan(window).kv_indices)


@on_device
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_plan_into_buffers_of_any_content(dtype: torch.dtype) -> None:
    """Of more requests than are planned; what is out of range yields nothing."""
    rig = make(Case(lengths=(30, 989, 19, 600, 7), shared=0.3, evicted=0.3))
    num_slots = rig.keys.shape[0]
    spoiled = dataclasses.replace(
        rig,
        rows=rig.rows.clone(),
        requests=rig.requests.clone().to(dtype),
        lengths=rig.lengths.clone().to(dtype),
    )
    # Requests 0 and 4 cannot be read; in request 1 two entries cannot.
    spoiled.requests[0], spoiled.lengths[4] = rig.rows.shape[0], -1
    spoiled.rows[rig.requests[1], :2] = torch.tensor([num_slots, 2**31 - 1], dtype=torch.int32)
    rig.rows[rig.requests[1], :2] = -1
    rig.lengths[0] = rig.lengths[4] = 0
    expected = rig.plan()
    assert expected.shift is not None
    total = int(expected.kv_indptr[-1])
    positions = torch.cat(
        [
            (rig.rows[row, :length] >= 0).nonzero()[:, 0].int()
            for row, length in zip(rig.requests.tolist(), rig.lengths.tolist(), strict=True)
        ]
    )
    for capacity in (total + 50, total, 100, 0):
        buffers = plan_triton.PlanBuffers.of(9, capacity, DEVICE, positions=True)
        for side in vars(buffers).values():
            side.fill_(-7)
        assert buffers.positions is not None
        tensors = (spoiled.rows, spoiled.requests, spoiled.lengths, spoiled.cached_at)
        plan = plan_triton.plan_into(buffers, *map(there, tensors), num_slots=num_slots)
        assert plan.shift is not None
        assert_plans(
            RowPlan(plan.kv_indptr, plan.kv_indices[:total], plan.shift[:total]),
            RowPlan(
                expected.kv_indptr.clamp(max=capacity),
                expected.kv_indices[:capacity],
                expected.shift[:capacity],
            ),
        )
        found = buffers.positions.cpu()
        assert torch.equal(found[:total], positions[:capacity]) and (found[total:] == -7).all()
        assert (plan.kv_indices[total:] == -7).all() and (buffers.kv_indptr[6:] == -7).all()
        parts = plan.shift.cpu().tensor_split(plan.kv_indptr[1:].tolist())
        shifted = [bool(part.any()) for part in parts]
        if capacity >= total:
            assert buffers.shifted[:5].tolist() == shifted[:5] and buffers.shifted[5:].eq(-7).all()


@on_device
def test_entries_of_a_slot_lie_together() -> None:
    rig = repeating((130, 0, 30, 989, 1))
    expected = rig.plan(together=True)
    assert not torch.equal(expected.kv_indices, rig.plan().kv_indices)
    # Nothing is moved in the row of 30, which keeps the order of its positions.
    bounds = slice(*expected.kv_indptr[2:4].tolist())
    assert torch.equal(expected.kv_indices[bounds], rig.plan().kv_indices[bounds])
    for backend in ("triton", *(("torch",) if DEVICE == "cpu" else ())):
        assert_plans(plan_of(rig, together=True, backend=backend), expected)
    # The same request in another order.
    plain, sorted_out = (decode(rig, plan)[0] for plan in (rig.plan(), expected))
    torch.testing.assert_close(plain, sorted_out, rtol=2**-7, atol=2e-5)


@on_device
def test_a_kept_order_grows_and_goes_stale() -> None:
    rig = repeating((130, 30, 600))
    num_slots = rig.keys.shape[0]
    rows, cached_at = there(rig.rows), there(rig.cached_at)
    order = RowOrder(rows.shape[0], rows.shape[1], DEVICE)
    buffers = plan_triton.PlanBuffers.of(3, 1000, DEVICE)

    def found(lengths: list[int], window: int | None = None) -> RowPlan:
        plan = plan_triton.plan_into(
            buffers,
            rows,
            there(rig.requests),
            there(torch.tensor(lengths)),
            cached_at,
            num_slots=num_slots,
            window=window,
            order=order,
        )
        total = int(plan.kv_indptr[-1])
        assert plan.shift is not None
        return RowPlan(plan.kv_indptr, plan.kv_indices[:total], plan.shift[:total])

    assert_plans(found([130, 30, 600]), rig.plan())
    order.sort(rows, rig.requests.tolist(), [130, 30, 600], cached_at, num_slots=num_slots)
    assert_plans(found([130, 30, 600]), rig.plan(together=True))
    # Shorter than it was sorted: another request's row by now.
    rig.lengths = torch.tensor([129, 29, 599])
    assert_plans(found([129, 29, 599]), rig.plan())
    # A row that grew: what it gained comes last.
    order.sort(rows, rig.requests.tolist(), [120, 20, 500], cached_at, num_slots=num_slots)
    rig.lengths = torch.tensor([120, 20, 500])
    earlier = rig.plan(together=True)
    grown = found([130, 30, 600])
    rig.lengths = torch.tensor([130, 30, 600])
    for request in range(3):
        mine, before = (
            plan.kv_indices[plan.kv_indptr[request] : plan.kv_indptr[request + 1]]
            for plan in (grown, earlier)
        )
        whole = rig.plan()
        end = int(whole.kv_indptr[request + 1])
        assert torch.equal(mine[: len(before)].cpu(), before)
        gained = len(mine) - len(before)
        assert torch.equal(mine[len(before) :].cpu(), whole.kv_indices[end - gained : end])
    # Of the newest positions alone, wherever they come.
    windowed, expected = found([130, 30, 600], window=70), rig.plan(70)
    assert torch.equal(windowed.kv_indptr.cpu(), expected.kv_indptr)
    assert torch.equal(windowed.kv_indices.sort()[0].cpu(), expected.kv_indices.sort()[0])
    for request in rig.requests.tolist():
        order.forget(request)
    assert_plans(found([130, 30, 600]), rig.plan())


@on_device
def test_plans_that_do_not_fit_are_refused() -> None:
    rig = make(Case(lengths=(5, 6)))
    buffers = plan_triton.PlanBuffers.of(1, 10, DEVICE)
    tensors = [there(side) for side in (rig.rows, rig.requests, rig.lengths)]
    with pytest.raises(ValueError, match="2 requests, the buffers are for 1"):
        plan_triton.plan_into(buffers, *tensors, num_slots=9)
    with pytest.raises(ValueError, match="an order of rows"):
        plan_triton.plan_into(
            plan_triton.PlanBuffers.of(2, 10, DEVICE),
            *tensors,
            num_slots=9,
            order=RowOrder(3, 4, DEVICE),
        )
    with pytest.raises(ValueError, match="side by side"):
        plan_rows(tensors[0].T.contiguous().T, *tensors[1:], num_slots=99, backend="triton")


@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_follows_its_inputs() -> None:
    """Planned and read inside a CUDA graph; rows, lengths and homes change between replays."""
    rig = make(Case(lengths=(989, 19, 1, 300), evicted=0.1))
    num_slots, kv = rig.keys.shape[0], kv_of(rig)
    rows, requests, lengths, cached_at, query = map(
        there, (rig.rows, rig.requests, rig.lengths, rig.cached_at, rig.query)
    )
    buffers = plan_triton.PlanBuffers.of(4, 2000, DEVICE)

    def step() -> torch.Tensor:
        plan = plan_triton.plan_into(
            buffers, rows, requests, lengths, cached_at, num_slots=num_slots
        )
        return decode_attention(query, kv, plan, scale=rig.scale)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for changed in (rig.lengths, torch.tensor([500, 0, 1, 7]), torch.tensor([0, 0, 0, 0])):
        rig.lengths = changed
        lengths.copy_(changed)
        graph.replay()
        assert_attention(out.cpu(), rig.expected(rig.plan())[0])
    rig.lengths = torch.tensor([400, 19, 1, 300])
    lengths.copy_(rig.lengths)
    rig.cached_at = torch.where(rig.cached_at.abs() > 5000, rig.cached_at, rig.cached_at + 5)
    cached_at.copy_(rig.cached_at)
    graph.replay()
    assert_attention(out.cpu(), rig.expected(rig.plan())[0])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "group", "rotary_dim", "is_neox", "observed"),
    [
        (80, torch.bfloat16, 128, 4, 128, True, False),
        (90, torch.bfloat16, 128, 4, 128, True, False),
        (90, torch.bfloat16, 128, 4, 128, True, True),
        (90, torch.bfloat16, 128, 4, 0, True, False),
        (90, torch.bfloat16, 256, 8, 256, False, False),
        (90, torch.float8_e4m3fn, 128, 4, 128, True, True),
        (100, torch.bfloat16, 128, 4, 128, True, False),
    ],
    ids=str,
)
def test_decode_compiles_ahead_of_time(
    arch: int,
    dtype: torch.dtype,
    dim: int,
    group: int,
    rotary_dim: int,
    is_neox: bool,
    observed: bool,
) -> None:
    """By tensor cores, 16 bytes at a time, the next tile copied meanwhile."""
    pool, query = (
        torch.empty(1, 8, dim, dtype=dtype),
        torch.empty(1, 8 * group, dim, dtype=torch.bfloat16),
    )
    rotation: Any = SimpleNamespace(rotary_dim=rotary_dim, is_neox=is_neox) if rotary_dim else None
    constants = decode_triton.constants(query, pool, pool, rotation, logits=observed, splits=32)
    pointers = dict(
        query="bf16", keys=NAMES.get(dtype, "u8"), values=NAMES.get(dtype, "u8"), begin="i32",
        end="i32", kv_indices="i32", shift="i32", cosines="fp32", sines="fp32", parts="fp32",
        part_lse="fp32", logits="fp32",
    )  # fmt: skip
    ptx = compile_for(
        decode_triton.chunk_kernel,
        arch,
        pointers,
        {*pointers, *STRIDES} - {"end"},
        constants,
        {"scale", "logit_cap"},
        num_warps=decode_triton.warps(dim),
        num_stages=decode_triton.NUM_STAGES,
    )
    assert "mma" in ptx
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]+\], \[[^\]]+\], 0x10", ptx)
    # Neighbours change places one by one, and only where a tile has many shifts.
    assert not is_neox or not re.findall(r"ld\.global\.(?:b8|b16|u8|u16)\b", ptx)
    assert ".local" not in ptx


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no compiler")
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_the_other_kernels_compile_ahead_of_time(arch: int) -> None:
    ints = dict.fromkeys(
        ("begin", "end", "kv_indices", "shift", "rows", "order", "sorted_counts", "cached_at", "counts",
         "kv_indptr", "shifted", "positions", "added", "sizes"), "i32",
    )  # fmt: skip
    floats = dict.fromkeys(
        ("parts", "part_lse", "sinks", "lse", "cosines", "sines", "logits", "weights"), "fp32"
    )
    halves = dict.fromkeys(("out", "keys", "values", "out_k", "out_v"), "bf16")
    pointers = (
        ints | floats | halves | dict(requests="i64", lengths="i64", first="i64", bases="i64")
    )
    merge = dict(SINKS=True, LSE=True, V_DIM=128, V_COLS=128, SPLITS=32, CHUNK=256)
    gather = dict(
        ELEMENT="bf16", HALF=64, NEOX=True, K_DIM=128, V_DIM=128, K_COLS=128, V_COLS=128, ROWS=32
    )
    row = dict(ORDERED=True, PIECES=plan_triton.PIECES, TILE=plan_triton.TILE)
    note = dict(LATEST=8, AHEAD=8, TOTAL=True, PIECES=16, TILE=note_triton.TILE)
    scan = dict(PIECES=plan_triton.PIECES, REQUESTS=plan_triton.REQUESTS)
    weights = dict(heads=32, HEADS=weights_triton.HEADS, PIECES=64, TILE=weights_triton.TILE)
    for kernel, constants in (
        (decode_triton.merge_kernel, merge),
        (gather_triton.gather_kernel, gather),
        (plan_triton.count_kernel, row),
        (plan_triton.scan_kernel, scan),
        (plan_triton.write_kernel, row | dict(HOME=True, POSITIONS=True)),
        (weights_triton.weights_kernel, weights),
        (note_triton.note_kernel, note | dict(DECODE=True)),
        (note_triton.note_kernel, note | dict(DECODE=False)),
    ):
        ptx = compile_for(kernel, arch, pointers, {*halves, *floats, *STRIDES}, constants)
        assert ".local" not in ptx
        if kernel is weights_triton.weights_kernel:
            # A thread's loads of several heads are under way before the first is used.
            assert len(re.findall(r"ld\.global", ptx[: ptx.index("ex2.")])) >= weights_triton.HEADS
        if kernel is gather_triton.gather_kernel:
            assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)
