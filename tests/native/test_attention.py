# SPDX-License-Identifier: Apache-2.0
"""The C++ attention kernels, built for this machine and for older ones."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.native.attention import NativeKv, native_plan
from tests.kernels.attention_cases import (
    CASES,
    Case,
    Rig,
    assert_attention,
    assert_plans,
    make,
    poison,
    repeating,
)
from tests.kernels.rotary import TABLE
from tests.native.builds import CSRC, OLDER, build_as_older

SOURCES = sorted((CSRC / "attention").glob("*.cpp"))

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(scope="module", params=["native", *OLDER])
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library of this machine, or the kernels alone as an older CPU would run them."""
    if request.param == "native":
        return request.getfixturevalue("library")
    return build_as_older(request.param, SOURCES, tmp_path_factory.mktemp("build"))


def plan_of(library: ctypes.CDLL, rig: Rig, **changed: Any) -> RowPlan:
    """The native plan; ``changed`` replaces arguments."""
    arguments: dict[str, Any] = dict(
        rows=rig.rows,
        requests=rig.requests,
        lengths=rig.lengths,
        cached_at=rig.cached_at,
        num_slots=rig.keys.shape[0],
        window=-1,
        capacity=int(rig.lengths.sum()),
    )
    return RowPlan(*native_plan(library, **(arguments | changed)))


def decode(
    library: ctypes.CDLL,
    rig: Rig,
    plan: RowPlan,
    *,
    query: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    cap: float = 0.0,
    threads: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    query = rig.query if query is None else query
    begin, end = (plan.kv_indptr[:-1], plan.kv_indptr[1:]) if spans is None else spans
    if out is None:
        out = query.new_empty((*query.shape[:2], rig.case.v_dim))
    lse = torch.empty(query.shape[:2])
    NativeKv(library, rig.keys, rig.values, rig.rotation).decode(
        query, out, lse, begin, end, plan.kv_indices, plan.shift, sinks, rig.scale, cap, threads
    )
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_agrees_with_dense_attention(build: ctypes.CDLL, case: Case) -> None:
    rig = make(case)
    plan = plan_of(build, rig)
    assert_plans(plan, rig.plan())
    out, lse = decode(build, rig, plan)
    expected, expected_lse = rig.expected(plan)
    assert_attention(out, expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("window", [1, 8, 19, 5000])
def test_plan_of_the_newest_positions(build: ctypes.CDLL, window: int) -> None:
    rig = make(Case(evicted=0.3))
    assert_plans(plan_of(build, rig, window=window), rig.plan(window))


@pytest.mark.parametrize("window", [-1, 100])
def test_plan_with_entries_of_a_slot_together(build: ctypes.CDLL, window: int) -> None:
    rig = repeating((130, 0, 30, 989, 1))
    # Shifts and slots up to the ends of their bits.
    rig.cached_at[rig.rows[rig.requests[3], 200:203].clamp(min=0)] = torch.tensor(
        [2**31 - 1, -(2**31) + 989, 300], dtype=torch.int32
    )
    expected = rig.plan(None if window < 0 else window, together=True)
    assert_plans(plan_of(build, rig, window=window, together=True), expected)


def test_plan_of_the_last_slots_together(build: ctypes.CDLL) -> None:
    last = 2**31 - 1
    rows = torch.tensor([[last - 1, 70, last - 64, 3, last - 1]], dtype=torch.int32)
    _, indices, shift = native_plan(
        build,
        rows,
        torch.tensor([0]),
        torch.tensor([5]),
        cached_at=None,
        num_slots=last,
        window=-1,
        capacity=5,
        together=True,
    )
    assert indices.tolist() == [3, 70, last - 64, last - 1, last - 1] and shift is None


def test_plan_without_cached_positions_moves_nothing(build: ctypes.CDLL) -> None:
    rig = make(Case(shared=1.0))
    plan = plan_of(build, rig, cached_at=None)
    assert plan.shift is None
    assert torch.equal(plan.kv_indices, rig.plan().kv_indices)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"requests": torch.tensor([0, 1, 2, 6])}, "requests"),
        ({"requests": torch.tensor([0, -1, 2, 3])}, "requests"),
        ({"lengths": torch.tensor([0, 1, 19, 993])}, "lengths"),
        ({"lengths": torch.tensor([0, 1, -1, 9])}, "lengths"),
        ({"capacity": 1008}, "capacity"),
        ({"num_slots": 600}, "slot"),
    ],
)
def test_plan_refuses_what_it_cannot_read(
    build: ctypes.CDLL, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(build, make(Case()), **changed)


@pytest.mark.parametrize("heads", [2, 8, 6])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_soft_cap_and_sinks(build: ctypes.CDLL, heads: int, cap: float, with_sinks: bool) -> None:
    rig = make(Case(heads=heads, query_dtype=torch.float32, lengths=(0, 1, 19, 989)))
    rig.query *= 8
    sinks = torch.linspace(-2, 6, heads) if with_sinks else None
    plan = plan_of(build, rig)
    out, lse = decode(build, rig, plan, cap=cap, sinks=sinks)
    expected, expected_lse = rig.expected(plan, cap=cap, sinks=sinks)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-4)


def test_queries_and_outputs_may_be_strided(build: ctypes.CDLL) -> None:
    """SGLang hands out a slice of the fused projection."""
    rig = make(Case())
    plan = plan_of(build, rig)
    expected, _ = decode(build, rig, plan)
    batch, heads, dim = rig.query.shape
    wide = torch.full((batch, heads + 3, dim + 8), float("nan"), dtype=rig.query.dtype)
    wide[:, 1 : heads + 1, 8:] = rig.query
    room = torch.zeros((batch, heads + 1, dim + 4), dtype=rig.query.dtype)
    out, _ = decode(build, rig, plan, query=wide[:, 1 : heads + 1, 8:], out=room[:, :heads, :dim])
    assert torch.equal(out, expected)
    assert not room[:, heads:].any() and not room[:, :, dim:].any()


@pytest.mark.parametrize("lengths", [(3000,), (700, 30, 5, 2000), (40,) * 30])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (32, 8), (1, 1)])
def test_bits_do_not_depend_on_threads(
    build: ctypes.CDLL, lengths: tuple[int, ...], heads: int, kv_heads: int
) -> None:
    rig = make(Case(lengths=lengths, heads=heads, kv_heads=kv_heads, k_dim=128, v_dim=128))
    plan = plan_of(build, rig)
    alone = decode(build, rig, plan, threads=1)
    for threads in (2, 2, 3, 8):
        assert all(map(torch.equal, alone, decode(build, rig, plan, threads=threads)))


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_the_rest_of_the_batch(build: ctypes.CDLL, threads: int) -> None:
    """Requests of very unlike lengths take turns; each as if it had the pool to itself."""
    lengths = (1100, 0, 15, 16, 17, 512, 513, 0, 1024, 1, 1500, 640)
    rig = make(Case(lengths=lengths, heads=8, kv_heads=2, k_dim=64, v_dim=64))
    plan = plan_of(build, rig)
    together = decode(build, rig, plan, threads=threads)
    begin, end = plan.kv_indptr[:-1], plan.kv_indptr[1:]
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        alone = decode(build, rig, plan, query=rig.query[one], spans=(begin[one], end[one]))
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, together, strict=True))


def test_calls_at_once(build: ctypes.CDLL) -> None:
    """Threads of the interpreter may call together; one of them gets the helpers."""
    rig = make(Case(lengths=(900, 1500), k_dim=128, v_dim=128, kv_heads=4, heads=8))
    plan = plan_of(build, rig)
    expected, _ = decode(build, rig, plan)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: decode(build, rig, plan, threads=1 + i % 3)[0], range(40)))
    assert all(torch.equal(out, expected) for out in found)


def test_a_forked_child_has_threads_of_its_own(build: ctypes.CDLL) -> None:
    rig = make(Case(lengths=(2000, 2000), k_dim=128, v_dim=128))
    plan = plan_of(build, rig)
    expected, _ = decode(build, rig, plan, threads=2)
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = torch.equal(decode(build, rig, plan, threads=2)[0], expected)
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_several_queries_may_read_the_same_entries(build: ctypes.CDLL) -> None:
    rig = make(Case(lengths=(989, 19), query_dtype=torch.float32))
    plan = plan_of(build, rig)
    spans = tuple(
        torch.tensor(side, dtype=torch.int32) for side in ((0, 0, 5, 989), (989, 988, 5, 990))
    )
    query = rig.query[[0, 0, 1, 1]]
    out, _ = decode(build, rig, plan, query=query, spans=spans)  # type: ignore[arg-type]
    assert_attention(out, rig.expected(plan, spans, query)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_where_it_is_read(
    build: ctypes.CDLL, side: str, value: float
) -> None:
    rig = make(Case(lengths=(989, 19, 1)))
    plan = plan_of(build, rig)
    sound, _ = decode(build, rig, plan)
    getattr(rig, side)[int(plan.kv_indices[700]), 1, -1] = value
    out, _ = decode(build, rig, plan)
    assert not out[0, 2:].isfinite().all()
    assert torch.equal(out[0, :2], sound[0, :2])
    assert torch.equal(out[1:], sound[1:])


def test_slots_of_nobody_are_not_read(build: ctypes.CDLL) -> None:
    """They hold NaN in every test here; the plan names none of them."""
    rig = make(Case(evicted=0.4))
    plan = plan_of(build, rig)
    assert rig.keys[0].isnan().all() and 0 not in plan.kv_indices
    others = torch.ones(rig.keys.shape[0], dtype=torch.bool)
    others[plan.kv_indices.long()] = False
    assert rig.values[others].isnan().all()
    assert decode(build, rig, plan, threads=2)[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("kv_indices", 5, -1, "slot"),
        ("kv_indices", 5, 10_000, "slot"),
        ("shift", 5, TABLE, "shift"),
        ("shift", 5, -TABLE, "shift"),
        ("shift", 5, -(2**31), "shift"),
        ("kv_indptr", 4, 5000, "begin and end"),
        ("kv_indptr", 2, -1, "begin and end"),
        ("kv_indptr", 2, 900, "begin and end"),
    ],
)
def test_decode_refuses_what_it_cannot_read(
    build: ctypes.CDLL, name: str, index: int, value: int, message: str
) -> None:
    rig = make(Case())
    plan = plan_of(build, rig)
    getattr(plan, name)[index] = value
    out = torch.full((4, 4, 64), 7.0, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        decode(build, rig, plan, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.lengths], ids=str)
def test_gather_agrees_with_indexing(build: ctypes.CDLL, case: Case) -> None:
    rig = make(case)
    plan = plan_of(build, rig)
    count = len(plan.kv_indices)
    kv = NativeKv(build, rig.keys, rig.values, rig.rotation)
    for dtype in {case.query_dtype, torch.float32, torch.bfloat16, torch.float16}:
        out_k = torch.empty((case.kv_heads, count, case.k_dim), dtype=dtype)
        out_v = torch.empty((case.kv_heads, count, case.v_dim), dtype=dtype)
        kv.gather(plan.kv_indices, plan.shift, out_k, out_v, 2)
        assert_attention(out_k, rig.rotated(plan).transpose(0, 1))
        values = rig.values[plan.kv_indices.long()] if rig.values.element_size() > 1 else None
        if values is not None:
            assert torch.equal(out_v, values.float().transpose(0, 1).to(dtype))
        stays = torch.ones(count, dtype=torch.bool) if plan.shift is None else plan.shift == 0
        if dtype == rig.keys.dtype:
            assert torch.equal(
                out_k[:, stays], rig.keys[plan.kv_indices.long()].transpose(0, 1)[:, stays]
            )


def test_gather_refuses_what_it_cannot_read(build: ctypes.CDLL) -> None:
    rig = make(Case())
    plan = plan_of(build, rig)
    kv = NativeKv(build, rig.keys, rig.values, rig.rotation)
    out = torch.full((2, len(plan.kv_indices), 64), 7.0)
    for name, value in (("kv_indices", 10_000), ("kv_indices", -1), ("shift", TABLE)):
        spoiled = {name: getattr(plan, name).clone() for name in ("kv_indices", "shift")}
        spoiled[name][3] = value
        with pytest.raises(ValueError, match=name if name == "shift" else "slot"):
            kv.gather(**spoiled, out_k=out, out_v=out.clone(), threads=1)
    assert (out == 7).all()


def test_every_half_rounds_as_pytorch_does(build: ctypes.CDLL) -> None:
    """Outputs of one entry are its values: conversions over all exponents, ties included."""
    bits = torch.arange(2**16, dtype=torch.int64)
    values = torch.cat([(bits << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    values = values.to(torch.uint32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        pool = values.view(-1, 1, 8)
        kv = NativeKv(build, pool, pool, None)
        out = torch.empty((1, len(pool), 8), dtype=dtype)
        kv.gather(torch.arange(len(pool), dtype=torch.int32), None, out, out.clone(), 1)
        expected = values.to(dtype)
        assert torch.equal(out.flatten().isnan(), expected.isnan())
        assert torch.equal(out.flatten().nan_to_num(), expected.nan_to_num())


def test_poison_helper_poisons() -> None:
    """The tests above would prove nothing otherwise."""
    buffer = torch.zeros(3, 1, 8, dtype=torch.float8_e4m3fn)
    poison(buffer, torch.tensor([False, True, False]))
    assert buffer.float()[1].isnan().all() and not buffer.float()[[0, 2]].isnan().any()
