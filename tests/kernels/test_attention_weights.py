# SPDX-License-Identifier: Apache-2.0
"""Softmax weights as a side output of decode attention, against dense attention in fp64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan
from tests.kernels.attention_cases import CASES, Case, Rig, expected_weights, make
from tests.kernels.backends import backend as backend

SOME = [case for case in CASES if case.shared or case.evicted or case.heads > 4]


def run(
    rig: Rig, backend: str, plan: RowPlan, entries: int, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    query = options.pop("query", rig.query)
    assert isinstance(query, torch.Tensor)
    kv = PagedKv(rig.keys, rig.values, rig.rotation, backend=backend)
    weights = torch.zeros(entries)
    out = decode_attention(query, kv, plan, scale=rig.scale, weights=weights, **options)  # type: ignore[arg-type]
    return out, weights


@pytest.mark.parametrize("case", SOME, ids=str)
def test_weights_are_those_of_dense_attention(case: Case, backend: str) -> None:
    rig = make(case)
    plan = rig.plan()
    out, weights = run(rig, backend, plan, len(plan.kv_indices))
    torch.testing.assert_close(weights.double(), expected_weights(rig, plan), rtol=1e-4, atol=1e-6)
    # Each query head gives out a weight of 1.
    counts = plan.kv_indptr.diff().tolist()
    for part, count in zip(weights.split(counts), counts, strict=True):
        assert float(part.sum()) == pytest.approx(case.heads if count else 0, rel=1e-4)
    kv = PagedKv(rig.keys, rig.values, rig.rotation, backend=backend)
    assert torch.equal(out, decode_attention(rig.query, kv, plan, scale=rig.scale))


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps_and_sinks(backend: str, cap: float, has_sinks: bool) -> None:
    rig = make(Case(lengths=(1, 70, 1100), heads=6))
    plan = rig.plan()
    sinks = torch.linspace(-2, 3, 6) if has_sinks else None
    _, weights = run(rig, backend, plan, len(plan.kv_indices), logit_cap=cap, sinks=sinks)
    right = expected_weights(rig, plan, cap=cap, sinks=sinks)
    torch.testing.assert_close(weights.double(), right, rtol=1e-4, atol=1e-6)


def test_queries_over_the_same_entries_stay_apart(backend: str) -> None:
    rig = make(Case(lengths=(20, 700)))
    plan = rig.plan()
    begin = torch.tensor([20, 0, 20, 20, 5], dtype=torch.int32)
    end = torch.tensor([700, 20, 720, 20, 6], dtype=torch.int32)
    query = torch.randn((5, rig.case.heads, rig.case.k_dim)).to(rig.query.dtype)
    spans, entries = (begin, end), int((end - begin).sum())
    _, weights = run(rig, backend, plan, entries, spans=spans, query=query)
    right = expected_weights(rig, plan, spans, query)
    torch.testing.assert_close(weights.double(), right, rtol=1e-4, atol=1e-6)


def test_they_are_added(backend: str) -> None:
    rig = make(Case())
    plan = rig.plan()
    _, once = run(rig, backend, plan, len(plan.kv_indices))
    kv = PagedKv(rig.keys, rig.values, rig.rotation, backend=backend)
    twice = once.clone()
    decode_attention(rig.query, kv, plan, scale=rig.scale, weights=twice)
    torch.testing.assert_close(twice, 2 * once)


def test_threads_do_not_change_them() -> None:
    try:
        native.library()
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    for lengths, kv_heads in itertools.product(((5000,), (700, 1, 2600, 0)), (1, 4)):
        rig = make(Case(lengths=lengths, heads=8, kv_heads=kv_heads))
        plan = rig.plan()
        alone, several = (
            run(rig, "native", plan, len(plan.kv_indices), threads=threads)[1] for threads in (1, 4)
        )
        assert torch.equal(alone, several)


def test_refused(backend: str) -> None:
    rig = make(dataclasses.replace(Case(), lengths=(3, 5)))
    plan = rig.plan()
    kv = PagedKv(rig.keys, rig.values, rig.rotation, backend=backend)
    for weights in (torch.zeros(7), torch.zeros(9), torch.zeros(8, 1), torch.zeros(8).double()):
        with pytest.raises(ValueError, match="weights must be"):
            decode_attention(rig.query, kv, plan, scale=1.0, weights=weights)
