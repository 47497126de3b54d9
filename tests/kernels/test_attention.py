# SPDX-License-Identifier: Apache-2.0
"""Tests plans (which slots a batch reads), decode, gather and extend: compares backends with plain PyTorch."""

import dataclasses
from typing import Any

import pytest
import torch

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import ExtendPlan, extend_attention, gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.row_plan import TILE as TILE_ENTRIES
from sglang_reasoncache.kernels.row_plan import Rotations, RowPlan
from sglang_reasoncache.native.pool import DTYPES
from tests.kernels.attention_cases import (
    CASES,
    FEW,
    LATENT,
    TABLE,
    Case,
    Rig,
    assert_attention,
    assert_plans,
    make,
)
from tests.kernels.engines import backend as backend
from tests.kernels.engines import by_engine
from tests.kernels.engines import cpu as cpu
from tests.triton_runs import DEVICE, INTERPRETED, there
from tests.triton_runs import small_launches as small_launches
from tests.triton_runs import test_interpreted as test_interpreted

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def placed(value: Any, backend: str) -> Any:
    """Moves a tensor, or a tuple of tensors, to the device of the backend."""
    if backend != "triton" or value is None:
        return value
    if isinstance(value, RowPlan | Rotations):
        return type(value)(*(placed(side, backend) for side in value))
    if isinstance(value, tuple):
        return tuple(placed(side, backend) for side in value)
    return there(value) if isinstance(value, torch.Tensor) else value


def kv_of(rig: Rig, backend: str) -> PagedKv:
    keys, values = placed((rig.keys, rig.values), backend)
    latent = rig.case.layout == LATENT
    kv = PagedKv(keys, values, rig.rotation, latent=latent, backend=backend)
    assert kv.backend == backend
    return kv


def plan_of(rig: Rig, backend: str, **changed: Any) -> RowPlan:
    """The backend's plan, moved to the host. ``changed`` replaces arguments."""
    sides = dict(rows=rig.rows, requests=rig.requests, lengths=rig.lengths, cached_at=rig.cached_at)
    arguments: dict[str, Any] = sides | dict(num_slots=len(rig.keys)) | changed
    if backend != "triton":
        return plan_rows(**arguments)
    from sglang_reasoncache.kernels import plan_triton

    arguments = {name: placed(value, backend) for name, value in arguments.items()}
    merge = arguments.pop("merge", False)
    buffers = plan_triton.PlanBuffers.of(len(rig.requests), rig.rows.numel(), DEVICE, merge=merge)
    return cut(plan_triton.plan_into(buffers, **arguments))


def cut(plan: RowPlan) -> RowPlan:
    """Moves a plan to the host, and cuts off the parts of its buffers that are not in use."""
    total = int(plan.kv_indptr[-1])
    rotations = None
    shift = None
    assert (plan.shift is None) == (plan.rotations is not None)
    if plan.shift is not None and plan.shift[:total].any():
        shift = plan.shift[:total].cpu()
    if plan.rotations is not None:
        tile_ptr, by, bits = plan.rotations
        tile_ptr = tile_ptr[: total // TILE_ENTRIES + len(plan.kv_indptr)].cpu()
        count = int(tile_ptr[-1])
        rotations = Rotations(tile_ptr, by[:count].cpu(), bits[:count].cpu()) if count else None
    return RowPlan(plan.kv_indptr.cpu(), plan.kv_indices[:total].cpu(), shift, rotations)


def decode(rig: Rig, backend: str, plan: RowPlan, **options: Any) -> torch.Tensor:
    """The output of the backend's decode, moved to the host."""
    given = {"query": rig.query, "plan": plan, **options}
    arguments: Any = {name: placed(value, backend) for name, value in given.items()}
    return decode_attention(kv=kv_of(rig, backend), scale=rig.scale, **arguments).cpu()


def assert_decode(
    rig: Rig, backend: str, plan: RowPlan, atol: float | None = None, **options: Any
) -> torch.Tensor:
    """Checks that decode gives the output of dense attention. Returns the output."""
    out = decode(rig, backend, plan, **options)
    named = {name.removeprefix("logit_"): value for name, value in options.items()}
    assert_attention(out, rig.expected(plan, **named), atol)
    return out


BY_ENGINE = pytest.mark.parametrize(
    ("backend", "case"),
    by_engine(dict.fromkeys((*CASES, *FEW)), FEW),
    ids=str,
    indirect=["backend"],
)


@BY_ENGINE
def test_agrees_with_dense_attention(backend: str, case: Case) -> None:
    """Slots that no request reads hold NaN, so the output would be NaN if a kernel used such a slot."""
    rig = make(case)
    plan = plan_of(rig, backend)
    assert_plans(plan, rig.plan())
    assert_decode(rig, backend, plan)
    merged = plan_of(rig, backend, merge=True)
    assert_plans(merged, rig.plan(merge=True))
    assert (merged.rotations is None) == (plan.shift is None)
    assert_attention(decode(rig, backend, merged), rig.expected(plan))


#: Lists of shifts (by how many positions keys are rotated). A test repeats one list over all entries.
TILES = ([0], [7], [0, 0, -300], [5, -9, 0], [5, -9, 0, 300, 1, -1, TABLE - 1])


#: Values of ``is_neox`` and ``dtype``. The interpreter runs two combinations, other engines run all four.
KEYS = [(True, torch.bfloat16), (False, torch.float32)]
if not INTERPRETED:
    KEYS += [(True, torch.float32), (False, torch.bfloat16)]


@pytest.mark.parametrize("shifts", TILES, ids=str)
@pytest.mark.parametrize(("is_neox", "dtype"), KEYS, ids=str)
def test_every_sort_of_tile(
    backend: str, shifts: list[int], is_neox: bool, dtype: torch.dtype
) -> None:
    case = Case(lengths=(3, 200), heads=2, kv_heads=1, is_neox=is_neox, shared=0.0, dtype=dtype)
    rig = make(dataclasses.replace(case, query_dtype=torch.float32))
    shifted = torch.tensor(shifts * 203, dtype=torch.int32)[:203]
    shifted[:3] = 0
    plan = rig.plan()._replace(shift=shifted)
    out = assert_decode(rig, backend, plan)
    # The second request's shifts do not change a bit of the first request's output.
    alone = RowPlan(plan.kv_indptr[:2], plan.kv_indices[:3], None)
    assert torch.equal(out[:1], decode(rig, backend, alone, query=rig.query[:1]))


def test_slots_of_many_positions(backend: str) -> None:
    """A row may have one slot many times, or many slots twice. A request decoded alone gives the same bits."""
    many = 100 if INTERPRETED else 1000
    rig = make(Case(lengths=(many + 150, 70, 300), heads=6, kv_heads=2, shared=0.0))
    rows = [rig.rows[request] for request in rig.requests.tolist()]
    rows[0][100 : 100 + many] = rows[0][10].item()
    rows[2][150:278:2] = rows[2][:64].clone()
    rows[2][70:100:3] = rows[2][299].item()
    rows[2][20] = -1
    plan = plan_of(rig, backend, merge=True)
    assert_plans(plan, rig.plan(merge=True))
    assert len(plan.kv_indices) + many + 63 + 11 == sum(rig.case.lengths)
    out = decode(rig, backend, plan)
    assert_attention(out, rig.expected(rig.plan()))
    for i, shares in ((0, True), (1, False)):
        here = dict(requests=rig.requests[i : i + 1], lengths=rig.lengths[i : i + 1])
        alone = plan_of(rig, backend, **here, merge=True)
        assert (alone.rotations is not None) == shares
        assert torch.equal(out[i : i + 1], decode(rig, backend, alone, query=rig.query[i : i + 1]))


@pytest.mark.parametrize(
    ("heads", "cap", "with_sinks"),
    [(6, 5.0, True)] if INTERPRETED else [(2, 0.0, True), (6, 5.0, True), (8, 5.0, False)],
)
def test_soft_cap_and_sinks(backend: str, heads: int, cap: float, with_sinks: bool) -> None:
    lengths = (0, 1, 19, 150) if INTERPRETED else (0, 1, 19, 70, 1100)
    rig = make(Case(lengths, heads, dtype=torch.float16, query_dtype=torch.float32, repeated=0.3))
    rig.query *= 8
    sinks = torch.linspace(-2, 6, heads) if with_sinks else None
    options: dict[str, Any] = dict(logit_cap=cap, sinks=sinks)
    plan = plan_of(rig, backend)
    assert_decode(rig, backend, plan, atol=1e-4, **options)
    merged = decode(rig, backend, plan_of(rig, backend, merge=True), **options)
    assert_attention(merged, rig.expected(plan, cap=cap, sinks=sinks), 1e-4)


def test_queries_may_read_the_same_entries(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several queries read entries of the same request. In this test a Triton launch takes at most three."""
    if backend == "triton":
        monkeypatch.setattr("sglang_reasoncache.kernels.decode_triton.QUERIES", 3)
    rig = make(Case(lengths=(300, 19), query_dtype=torch.float32))
    plan = plan_of(rig, backend)
    sides = (0, 0, 5, 300, 7, 1, 299, 40), (300, 299, 5, 301, 50, 2, 319, 40)
    begin, end = (torch.tensor(side, dtype=torch.int32) for side in sides)
    query = rig.query[[0, 0, 1, 1, 0, 1, 0, 1]]
    assert_decode(rig, backend, plan, query=query, spans=(begin, end))


def test_queries_may_be_strided(backend: str) -> None:
    """SGLang passes queries as a slice of a fused projection, so they are not contiguous."""
    rig = make(Case(lengths=(19, 70)))
    plan = rig.plan()
    batch, heads, dim = rig.query.shape
    wide = torch.full((batch, heads + 3, dim + 8), float("nan"), dtype=rig.query.dtype)
    wide[:, 1 : heads + 1, 8:] = rig.query
    found = decode(rig, backend, plan, query=wide[:, 1 : heads + 1, 8:])
    assert torch.equal(found, decode(rig, backend, plan))


@pytest.mark.parametrize(("side", "value"), [("keys", float("nan")), ("values", float("inf"))])
def test_what_is_not_finite_shows_where_it_is_read(backend: str, side: str, value: float) -> None:
    rig = make(Case(lengths=(300, 19, 1) if INTERPRETED else (989, 19, 1)))
    plan = rig.plan()
    sound = decode(rig, backend, plan)
    assert sound.isfinite().all()
    getattr(rig, side)[int(plan.kv_indices[200]), 1, -1] = value
    out = decode(rig, backend, plan)
    assert not out[0, 2:].isfinite().all()
    assert torch.equal(out[0, :2], sound[0, :2])
    assert torch.equal(out[1:], sound[1:])


@BY_ENGINE
def test_gather_agrees_with_indexing(backend: str, case: Case) -> None:
    rig = make(case)
    plan = rig.plan()
    slots = plan.kv_indices.long()
    kv = kv_of(rig, backend)
    entries = placed(plan, backend)
    # The interpreter skips these dtypes, because it truncates fp32 to bf16, where a GPU rounds.
    others = (torch.float32, torch.bfloat16) if not INTERPRETED else ()
    for dtype in {case.query_dtype, torch.float16, *others}:
        out_k, out_v = (s.cpu() for s in gather_kv(kv, entries.kv_indices, entries.shift, dtype))
        assert out_k.is_contiguous() and out_v.is_contiguous()
        assert_attention(out_k, rig.rotated(plan).transpose(0, 1))
        assert torch.equal(out_v, rig.values.float()[slots].transpose(0, 1).to(dtype))
        stays = slots >= 0 if plan.shift is None else plan.shift == 0
        cached = rig.with_values(rig.keys.float()[slots], slots).transpose(0, 1)
        assert torch.equal(out_k[:, stays], cached[:, stays].to(dtype))


#: The interpreter runs only 8-bit dtypes, because 16-bit dtypes have 65,536 codes, which would take a minute.
CODES = [dtype for dtype in DTYPES if dtype.itemsize < (2 if INTERPRETED else 4)]


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_reads_every_code_exactly(backend: str, dtype: torch.dtype) -> None:
    """Every bit pattern of a dtype is read exactly, also subnormals and NaN. Its index in the vector varies."""
    bits = torch.int8 if dtype.itemsize == 1 else torch.int16
    count = 1 << (8 * dtype.itemsize)
    dim = 67
    slots = torch.arange(count, dtype=torch.int32)
    keys = torch.zeros(count, 1, dim).to(dtype)
    keys.view(bits)[slots, 0, slots % dim] = slots.to(bits)
    own, entries = placed((keys, slots), backend)
    found, _ = gather_kv(PagedKv(own, own, backend=backend), entries, None, torch.float32)
    expected = keys[:, 0].float()
    torch.testing.assert_close(found[0].cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_plan(backend: str, dtype: torch.dtype) -> None:
    rig = make(Case(lengths=(0, 1, 19, 1300), evicted=0.3))
    ints = dict(lengths=rig.lengths.to(dtype), requests=rig.requests.to(dtype))
    assert_plans(plan_of(rig, backend, **ints), rig.plan())
    as_cached = rig.plan()._replace(shift=None)
    assert_plans(plan_of(rig, backend, **ints, cached_at=None), as_cached)


def test_plan_of_evicted_neighbours(backend: str) -> None:
    """Evicted positions (values below 0) yield no rotation. For them, C++ looks up the cached position of
    slot 0. That position must not change the plan, even if it would continue a run of equal shifts."""
    row = torch.tensor([[1, -1, 1, -1, 2, -(2**31), 1, -1, -1, 2, -7, 0]], dtype=torch.int32)
    rig = make(Case())
    where: dict[str, Any] = dict(
        rows=row, requests=torch.tensor([0, 0]), lengths=torch.tensor([12, 9])
    )
    for anything in (1, 5, -1, 12, 2**31 - 1, -(2**31)):
        sides = where | dict(cached_at=torch.tensor([anything, 0, 4], dtype=torch.int32))
        expected = dataclasses.replace(rig, **sides).plan(merge=True)
        assert expected.rotations is not None
        # Position 11 of the first request reads slot 0, whose cached position is ``anything``.
        found = expected.rotations.by.tolist()
        assert (found[:4], len(found), found[-3:]) == ([0, 2, 6, 5], 8, [0, 2, 6])
        assert_plans(plan_of(rig, backend, **sides, num_slots=3, merge=True), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"requests": torch.tensor([0, 1, 2, 6])}, "requests"),
        ({"requests": torch.tensor([0, -1, 2, 3])}, "requests"),
        ({"lengths": torch.tensor([0, 1, 19, 993])}, "lengths"),
        ({"lengths": torch.tensor([0, 1, -1, 9])}, "lengths"),
        ({"lengths": torch.tensor([0, 1, 19, -3000])}, "lengths"),
        ({"lengths": torch.tensor([0, 1, 19])}, "batch"),
        ({"num_slots": 600, "cached_at": None}, "slot"),
        ({"cached_at": torch.zeros(3, dtype=torch.int32)}, "cached_at must be"),
        ({"rows": torch.zeros((6, 992))}, "rows must be"),
    ],
)
def test_plan_refuses(cpu: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(make(Case()), cpu, **changed)


#: Counts of new tokens, for rows of 1, 19 and 989 positions.
NEW = ([1, 1, 1], [0, 2, 4], [1, 19, 400], [0, 5, 300], [1, 1, 6])


@pytest.mark.parametrize("new", NEW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("singly", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_extend_sees_up_to_itself(
    cpu: str, new: list[int], dtype: torch.dtype, singly: bool, latent: bool
) -> None:
    case = Case(lengths=(1, 19, 989), dtype=dtype, query_dtype=dtype, heads=6)
    rig = make(case.latent(v_dim=72) if latent else case)
    plan = rig.plan()
    query = torch.randn((sum(new), 6, rig.case.query_dim)).to(dtype)
    extend_plan = ExtendPlan(plan, new, dtype, singly=singly)
    out = extend_attention(query, kv_of(rig, cpu), extend_plan, scale=rig.scale)
    ends = plan.kv_indptr.tolist()
    seen = [
        (first, last - later)
        for count, first, last in zip(new, ends, ends[1:], strict=False)
        for later in reversed(range(count))
    ]
    begin, end = torch.tensor(seen).T
    expected = rig.expected(plan, (begin, end), query)
    # In bf16, PyTorch's fused attention rounds weights and ``gather_kv`` rounds keys, so errors are larger.
    assert_attention(out, expected, 2e-5 if dtype == torch.float32 else 3e-2)


def test_extend_plans_say_what_they_cannot_read() -> None:
    rig = make(Case(lengths=(1, 19)))
    plan = rig.plan()
    kv = PagedKv(rig.keys, rig.values, rig.rotation, backend="native")
    for new, message in (([1], "2 entries"), ([1, 20], "20 new tokens in a row of 19")):
        with pytest.raises(ValueError, match=message):
            ExtendPlan(plan, new, torch.float32)
    long = ExtendPlan(plan, [1, 19], torch.bfloat16)
    query = rig.query[:1].expand(20, -1, -1)
    for some, cap, message in ((rig.query, 0.0, "20 tokens"), (query, 3.0, "singly")):
        with pytest.raises(ValueError, match=message):
            extend_attention(some, kv, long, scale=1.0, logit_cap=cap)


@pytest.mark.parametrize("shape", [(3, 4, 64), (4, 4, 32), (4, 3, 64), (4, 4, 64)])
def test_decode_refuses(cpu: str, shape: tuple[int, ...]) -> None:
    rig = make(Case())
    query = torch.zeros(shape).bfloat16()
    message = "query must be"
    if shape == rig.query.shape:
        query = query.double()
        message = "float64 is not supported"
    with pytest.raises(ValueError, match=message):
        decode(rig, cpu, rig.plan(), query=query)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("rotation", 0, 0, "no rotation"), ("kv_indices", 5, -1, "slot outside"),
        ("kv_indices", -1, 10_000, "slot outside"), ("shift", -1, TABLE, "rotary table"),
        ("shift", 5, -TABLE, "rotary table"), ("shift", 5, -(2**31), "rotary table"),
        ("kv_indptr", 4, 5000, "begin and end"), ("kv_indptr", 2, -1, "begin and end"),
        ("kv_indptr", 2, 900, "begin and end"), ("tile_ptr", -1, 10_000, "tile_ptr"),
        ("tile_ptr", 0, -1, "tile_ptr"), ("tile_ptr", 3, 10_000, "tile_ptr"),
        ("by", 1, TABLE, "rotary table"), ("by", -1, -(2**31), "rotary table"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(
    cpu: str, name: str, index: int, value: int, message: str
) -> None:
    rig = make(Case(repeated=0.5))
    plan = rig.plan()
    merged = rig.plan(merge=True)
    assert merged.rotations is not None
    if name == "rotation":
        rig.rotation = None
        with pytest.raises(ValueError, match=message):
            decode(rig, cpu, merged)
    else:
        changed: Any = merged.rotations if name in Rotations._fields else plan
        getattr(changed, name)[index] = value
    with pytest.raises(ValueError, match=message):
        decode(rig, cpu, merged if name in Rotations._fields else plan)
    if name in ("rotation", "kv_indices", "shift"):
        with pytest.raises(ValueError, match=message):
            gather_kv(kv_of(rig, cpu), plan.kv_indices, plan.shift, torch.float32)
