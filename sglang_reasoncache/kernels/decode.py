# SPDX-License-Identifier: Apache-2.0
"""Paged decode attention: one query token per row, grouped query heads, moved keys."""

from __future__ import annotations

import torch

from sglang_reasoncache.kernels import attention_reference
from sglang_reasoncache.kernels.paged import PagedKv, check_shift
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.pool import threads_of_a_call

#: Of queries that kernels read; others go through PyTorch.
_QUERIES = (torch.float32, torch.bfloat16, torch.float16)


def decode_attention(
    query: torch.Tensor,
    kv: PagedKv,
    plan: RowPlan,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    longest: int | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """``softmax(scale * q . k) v`` of every query over its own entries.

    A key moved by n positions is read as it lies in the pool, under the query rotated
    back by n: what that costs grows with the runs of equal shift, not with the entries.
    The result does not depend on the number of threads, nor on the rest of the batch.
    On a CUDA device the call only launches, and can be captured in a graph.

    Args:
        query: ``[batch, heads, k_dim]``, fp32, bf16 or fp16, elements of a head side by side.
        kv: Keys and values; ``heads`` is a multiple of its heads, and query head h reads
            KV head ``h // (heads / kv_heads)``.
        plan: What request b reads, unless ``spans`` says otherwise.
        scale: Of the logits.
        logit_cap: ``cap * tanh(logit / cap)``; 0 leaves logits as they are.
        sinks: fp32 ``[heads]``, logits that take weight and have no value.
        spans: int32 ``[batch]`` each, first entry of each query and one past its last;
            several queries may read the same entries.
        out: ``[batch, heads, v_dim]`` of the query's dtype, written; None makes one.
        lse: fp32 ``[batch, heads]``, natural log of the sum of exponentials, written.
        weights: fp32, one for each entry of query 0, then of query 1, and so on. Each entry's
            softmax weight, summed over the query heads, is added to it. "triton" takes any
            length: what lies beyond it is left out, what it has besides stays.
        longest: Upper bound on the entries of a query; None: all of the plan's. With
            ``weights``, "triton" has memory for the logits of as many, and leaves out others.
        threads: Upper bound on CPU threads; None takes what PyTorch uses. For "native".

    Returns:
        ``out``; zeros where there are no entries.

    Raises:
        ValueError: wrong dtype, shape or device; moved entries without a rotation; by
            "native" and "torch", a slot, span or shift out of range. "triton" does not
            look at values: such an entry counts as if it were not there.
    """
    check_shift(kv, plan.shift)
    batch = plan.kv_indptr.shape[0] - 1 if spans is None else spans[0].shape[0]
    heads, k_dim = query.shape[1:] if query.dim() == 3 else (0, 0)
    if query.shape[:1] != (batch,) or k_dim != kv.keys.shape[2] or heads % kv.num_heads:
        raise ValueError(
            f"query must be [{batch}, a multiple of {kv.num_heads}, {kv.keys.shape[2]}], "
            f"got {list(query.shape)}"
        )
    shape = (batch, heads, kv.values.shape[2])
    if out is None:
        out = query.new_empty(shape)
    elif out.shape != shape or out.dtype != query.dtype:
        raise ValueError(
            f"out must be {query.dtype} {list(shape)}, got {out.dtype} {list(out.shape)}"
        )
    if lse is not None and (
        lse.dtype != torch.float32 or lse.shape != (batch, heads) or not lse.is_contiguous()
    ):
        raise ValueError(f"lse must be fp32 [{batch}, {heads}], got {lse.dtype} {list(lse.shape)}")
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (heads,)):
        raise ValueError(f"sinks must be fp32 [{heads}], got {sinks.dtype} {list(sinks.shape)}")
    if weights is not None and (
        weights.dtype != torch.float32 or weights.dim() != 1 or not weights.is_contiguous()
    ):
        raise ValueError(
            f"weights must be fp32 [entries], got {weights.dtype} {list(weights.shape)}"
        )
    begin, end = (plan.kv_indptr[:-1], plan.kv_indptr[1:]) if spans is None else spans
    if begin.dtype != torch.int32 or end.dtype != torch.int32 or end.shape != begin.shape:
        raise ValueError(f"spans must be two int32 [batch], got {begin.dtype}, {end.dtype}")
    on_device = kv.backend == "triton" and query.dtype in _QUERIES
    if weights is not None and not on_device and len(weights) != int((end - begin).sum()):
        raise ValueError(f"weights must be [{int((end - begin).sum())}], got {len(weights)}")
    if kv.backend == "torch" or query.dtype not in _QUERIES:
        found, found_lse = attention_reference.decode_attention(
            query, kv.keys, kv.values, begin, end, plan.kv_indices, plan.shift, kv.rotation,
            scale, logit_cap, sinks, weights,
        )  # fmt: skip
        if lse is not None:
            lse.copy_(found_lse)
        return out.copy_(found)
    if query.device != kv.keys.device:
        query = query.to(kv.keys.device)
    if query.stride(2) != 1:
        query = query.contiguous()
    if out.stride(2) != 1:
        raise ValueError(f"out must have elements of a head side by side, got {out.stride()}")
    if kv.native is None:
        from sglang_reasoncache.kernels import decode_triton

        decode_triton.decode(
            query, kv.keys, kv.values, kv.rotation, out, lse, begin.contiguous(), end.contiguous(),
            plan.kv_indices.contiguous(), None if plan.shift is None else plan.shift.contiguous(),
            None if sinks is None else sinks.contiguous(), scale, logit_cap,
            weights, longest,
            # Whole rows lie side by side from 0, and so do their weights.
            first=plan.kv_indptr[:-1] if spans is None else None,
        )  # fmt: skip
        return out
    kv.native.decode(
        query,
        out,
        lse,
        begin.contiguous(),
        end.contiguous(),
        plan.kv_indices,
        plan.shift,
        None if sinks is None else sinks.contiguous(),
        scale,
        logit_cap,
        threads_of_a_call(threads),
        weights,
    )
    return out
