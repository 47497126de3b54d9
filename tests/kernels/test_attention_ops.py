# SPDX-License-Identifier: Apache-2.0
"""The attention operations as Python functions: the reference, extend, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import ExtendPlan, extend_attention
from sglang_reasoncache.kernels.gather import gather_kv
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan, plan_rows
from tests.kernels.attention_cases import (
    CASES,
    TABLE,
    Case,
    Rig,
    assert_attention,
    assert_plans,
    make,
    repeating,
)
from tests.kernels.backends import backend as backend


def plan_of(rig: Rig, backend: str, **changed: Any) -> RowPlan:
    """``changed`` replaces arguments."""
    arguments: dict[str, Any] = dict(
        rows=rig.rows,
        requests=rig.requests,
        lengths=rig.lengths,
        cached_at=rig.cached_at,
        num_slots=rig.keys.shape[0],
        backend=backend,
    )
    return plan_rows(**(arguments | changed))


def kv_of(rig: Rig, backend: str) -> PagedKv:
    kv = PagedKv(rig.keys, rig.values, rig.rotation, backend=backend)
    assert kv.backend == backend
    return kv


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_agrees_with_dense_attention(case: Case) -> None:
    rig = make(case)
    plan, expected_plan = plan_of(rig, "torch"), rig.plan()
    assert_plans(plan, expected_plan)
    lse = torch.empty((len(case.lengths), case.heads))
    out = decode_attention(rig.query, kv_of(rig, "torch"), plan, scale=rig.scale, lse=lse)
    expected_out, expected_lse = rig.expected(plan)
    assert_attention(out, expected_out)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("window", [1, 8, 5000])
def test_window(backend: str, window: int) -> None:
    rig = make(Case(evicted=0.3))
    plan, expected = plan_of(rig, backend, window=window), rig.plan(window)
    assert torch.equal(plan.kv_indices, expected.kv_indices)
    assert torch.equal(plan.kv_indptr, expected.kv_indptr)


@pytest.mark.parametrize("page", [1, 16])
def test_a_step_reads_what_is_kept(backend: str, page: int) -> None:
    """A subset of positions, or of pages, with their shifts; what was dropped before stays so."""
    rig = make(Case(lengths=(1, 19, 989), shared=0.4, evicted=0.2))
    generator = torch.Generator().manual_seed(6)
    pages = torch.rand((3, -(-989 // page)), generator=generator) < 0.3
    pages[:, 0] = True
    keep = pages.repeat_interleave(page, dim=1)
    found = plan_of(rig, backend, keep=keep)
    rows = rig.rows.clone()
    for kept, request in zip(keep, rig.requests, strict=True):
        rows[request, : keep.shape[1]][~kept[: rows.shape[1]]] = -1
    rig.rows = rows
    assert_plans(found, rig.plan())
    assert 0 < len(found.kv_indices) < sum((1, 19, 989))


def test_kept_positions_must_fit_the_batch(backend: str) -> None:
    rig = make(Case(lengths=(3, 5)))
    for keep in (torch.ones(3, 5, dtype=torch.bool), torch.ones(2, 5)):
        with pytest.raises(ValueError, match="keep must be bool"):
            plan_of(rig, backend, keep=keep)
    with pytest.raises(ValueError, match="length"):
        plan_of(rig, backend, keep=torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize("window", [None, 100])
def test_entries_of_a_slot_lie_together(backend: str, window: int | None) -> None:
    rig = repeating((130, 0, 30, 989, 1))
    found, expected = (
        plan_of(rig, backend, together=True, window=window),
        rig.plan(window, together=True),
    )
    assert_plans(found, expected)
    assert not torch.equal(expected.kv_indices, rig.plan(window).kv_indices)
    # Uses of a slot are no further apart than the entries of its window of 64 cached positions.
    assert found.shift is not None
    for begin, end in zip(found.kv_indptr, found.kv_indptr[1:], strict=False):
        if not found.shift[begin:end].any():
            continue
        windows = rig.cached_at[found.kv_indices[begin:end].long()] // 64
        for window_of in windows.unique():
            places = (windows == window_of).nonzero()
            assert places.max() - places.min() + 1 == len(places)
    # Nothing is known to be moved: every row is sorted.
    as_cached = plan_of(rig, backend, together=True, window=window, cached_at=None)
    for begin, end in zip(found.kv_indptr, found.kv_indptr[1:], strict=False):
        assert torch.equal(as_cached.kv_indices[begin:end], found.kv_indices[begin:end].sort()[0])


def test_order_does_not_change_attention(backend: str) -> None:
    rig = repeating((130, 30, 989))
    kv = kv_of(rig, backend)
    plain, together = (
        decode_attention(
            rig.query, kv, plan_of(rig, backend, together=together), scale=rig.scale
        ).float()
        for together in (False, True)
    )
    torch.testing.assert_close(plain, together, rtol=2**-7, atol=2e-5)
    # The row in which nothing is moved has the same bits.
    assert torch.equal(plain[1], together[1])


def test_lengths_may_be_int32(backend: str) -> None:
    rig = make(Case())
    narrow = plan_of(
        rig, backend, lengths=rig.lengths.to(torch.int32), requests=rig.requests.to(torch.int32)
    )
    assert torch.equal(narrow.kv_indices, rig.plan().kv_indices)


#: New tokens of rows of 1, 19 and 989 positions.
NEW = ([1, 1, 1], [0, 2, 4], [1, 19, 989], [0, 5, 300], [1, 1, 6])


@pytest.mark.parametrize("new", NEW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("singly", [False, True])
def test_extend_sees_up_to_itself(
    backend: str, new: list[int], dtype: torch.dtype, singly: bool
) -> None:
    case = Case(lengths=(1, 19, 989), dtype=dtype, query_dtype=dtype, heads=6)
    rig = make(case)
    plan = plan_of(rig, backend)
    query = torch.randn((sum(new), case.heads, case.k_dim)).to(dtype)
    extend_plan = ExtendPlan(plan, new, dtype, singly=singly)
    out = extend_attention(query, kv_of(rig, backend), extend_plan, scale=rig.scale)
    begin: list[int] = []
    end: list[int] = []
    for count, first, last in zip(new, plan.kv_indptr, plan.kv_indptr[1:], strict=False):
        begin += [int(first)] * count
        end += range(int(last) - count + 1, int(last) + 1)
    expected, _ = rig.expected(plan, (torch.tensor(begin), torch.tensor(end)), query)
    # PyTorch's fused attention rounds weights, and a gathered key is rounded once more.
    torch.testing.assert_close(
        out.double(), expected, rtol=0, atol=2e-5 if dtype == torch.float32 else 3e-2
    )


def test_extend_plans_say_what_they_cannot_read() -> None:
    rig = make(Case(lengths=(1, 19)))
    plan = plan_of(rig, "torch")
    with pytest.raises(ValueError, match="2 entries"):
        ExtendPlan(plan, [1], torch.float32)
    with pytest.raises(ValueError, match="20 new tokens in a row of 19"):
        ExtendPlan(plan, [1, 20], torch.float32)
    long = ExtendPlan(plan, [1, 19], torch.bfloat16)
    with pytest.raises(ValueError, match="20 tokens"):
        extend_attention(rig.query, kv_of(rig, "torch"), long, scale=1.0)
    query = rig.query[:1].expand(20, -1, -1)
    with pytest.raises(ValueError, match="singly"):
        extend_attention(query, kv_of(rig, "torch"), long, scale=1.0, logit_cap=3.0)


def test_decode_refuses_unlike_tensors(backend: str) -> None:
    rig = make(Case())
    plan, kv = plan_of(rig, backend), kv_of(rig, backend)

    def refuses(message: str, query: torch.Tensor = rig.query, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            decode_attention(query, kv, plan, scale=1.0, **options)

    refuses("query must be", rig.query[:3])
    refuses("query must be", rig.query[..., :32])
    refuses("query must be", rig.query[:, :3])
    refuses("out must be", out=torch.empty((4, 4, 64)))
    refuses("out must be", out=rig.query.new_empty((4, 4, 32)))
    refuses("lse must be", lse=torch.empty((4, 3)))
    refuses("sinks must be", sinks=torch.empty(3))
    refuses("spans must be", spans=(torch.zeros(4), torch.zeros(4)))
    shifted = PagedKv(rig.keys, rig.values, None, backend=backend)
    with pytest.raises(ValueError, match="no rotation"):
        decode_attention(rig.query, shifted, plan, scale=1.0)
    with pytest.raises(ValueError, match="no rotation"):
        gather_kv(shifted, plan.kv_indices, plan.shift, torch.float32)


def test_values_out_of_range_are_refused(backend: str) -> None:
    rig = make(Case())
    kv = kv_of(rig, backend)
    for name, value, message in (
        ("kv_indices", 10_000, "slot"),
        ("kv_indices", -1, "slot"),
        ("shift", TABLE, "rotary table"),
        ("kv_indptr", 5000, "begin and end"),
    ):
        plan = plan_of(rig, backend)
        getattr(plan, name)[-1] = value
        with pytest.raises(ValueError, match=message):
            decode_attention(rig.query, kv, plan, scale=1.0)
        if name != "kv_indptr":
            with pytest.raises(ValueError, match=message):
                gather_kv(kv, plan.kv_indices, plan.shift, torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"requests": torch.tensor([0, 1, 2, 6])}, "requests"),
        ({"lengths": torch.tensor([0, 1, -1, 9])}, "lengths"),
        ({"lengths": torch.tensor([0, 1, 19])}, "batch"),
        ({"num_slots": 600, "cached_at": None}, "slot"),
        ({"cached_at": torch.zeros(3, dtype=torch.int32)}, "home must be"),
        ({"rows": torch.zeros((6, 992))}, "rows must be"),
        ({"window": 0}, "window"),
    ],
)
def test_plan_refuses(backend: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(make(Case()), backend, **changed)


def test_pools_that_cannot_be_read_are_refused() -> None:
    rig = make(Case())
    with pytest.raises(ValueError, match="backend must be"):
        plan_of(rig, "cuda")
    with pytest.raises(ValueError, match="K and V alike"):
        PagedKv(rig.keys, rig.values[:-1])
    with pytest.raises(ValueError, match="V torch.float32"):
        PagedKv(rig.keys, rig.values.float())
    with pytest.raises(ValueError, match="rotary_dim 64 does not fit"):
        PagedKv(rig.keys[..., :32], rig.values, rig.rotation)
    with pytest.raises(ValueError, match="backend must be"):
        PagedKv(rig.keys, rig.values, backend="cuda")
    rotated = rig.keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert PagedKv(rotated, rig.values).backend == "torch"
    with pytest.raises(ValueError, match="side by side"):
        PagedKv(rotated, rig.values, backend="native")


def test_gather_agrees_with_the_reference(backend: str) -> None:
    for case in (Case(), dataclasses.replace(Case(), is_neox=False, k_dim=96, rotary_dim=32)):
        rig = make(case)
        plan = plan_of(rig, backend)
        keys, values = gather_kv(kv_of(rig, backend), plan.kv_indices, plan.shift, torch.float32)
        assert_attention(keys, rig.rotated(plan).transpose(0, 1))
        assert torch.equal(values, rig.values[plan.kv_indices.long()].float().transpose(0, 1))
