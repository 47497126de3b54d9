# SPDX-License-Identifier: Apache-2.0
"""Paged decode attention: one query token per row, grouped query heads, shifted keys."""

import torch

from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.native.pool import DTYPES, cpu_threads


def decode_attention(
    query: torch.Tensor,
    kv: PagedKv,
    plan: RowPlan,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    spans: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``softmax(scale * q . k) v`` of every query over its own entries, the slots that the plan lists for it.

    A *shifted* key, cached for another position, is read as it is. The query is rotated back instead, so the
    cost grows with the number of runs of equal shift. An entry is read once, however often its key is used. The
    result does not depend on the number of threads or on the rest of the batch. On a CUDA device the call only
    launches kernels, and can be captured in a graph.

    Args:
        query: ``[batch, heads, query_dim]`` on the pool's device, fp32, bf16 or fp16.
        kv: Keys and values; query head h reads KV head ``h // (heads / kv_heads)``.
        plan: What each request reads, unless ``spans`` says otherwise.
        scale: Factor of the logits.
        logit_cap: ``cap * tanh(logit / cap)``; 0 leaves logits as they are.
        sinks: fp32 ``[heads]``, logits that take a part of the weight but have no value.
        spans: First entry of each query, and the entry behind its last: int32 ``[batch]`` each. Several
            queries may read the same entries. Must be None if the plan has rotations.

    Returns:
        ``[batch, heads, v_dim]`` of the query's dtype; zeros for a query without entries.

    Raises:
        ValueError: wrong dtype, shape or device; shifted entries without a rotation; with the backend
            "native" a slot, span or shift out of range. "triton" skips such an entry.
    """
    kv.check(plan.shift, query.dtype)
    if plan.rotations is not None:
        kv.check(plan.rotations.by, query.dtype)
    begin, end = (plan.kv_indptr[:-1], plan.kv_indptr[1:]) if spans is None else spans
    batch = begin.shape[0]
    heads, k_dim = query.shape[1:] if query.dim() == 3 else (0, 0)
    fits = query.shape[:1] == (batch,) and k_dim == kv.query_dim and heads % kv.num_heads == 0
    if not fits or query.device != kv.keys.device:
        raise ValueError(
            f"query must be [{batch}, a multiple of {kv.num_heads}, {kv.query_dim}] on "
            f"{kv.keys.device}, got {list(query.shape)} on {query.device}"
        )
    if query.stride(2) != 1:
        query = query.contiguous()
    out = query.new_empty((batch, heads, kv.values.shape[2]))
    spans = begin.contiguous(), end.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    options = sinks, float(scale), float(logit_cap)
    if kv.native is not None:
        queries = query, out, batch, heads, *query.stride()[:2]
        rotations = plan.rotations or (None, None, None)
        count = 0 if plan.rotations is None else len(plan.rotations.by)
        reads = *spans, plan.kv_indices, plan.shift, len(plan.kv_indices), *rotations, count
        element = DTYPES.index(query.dtype)
        kv.native.call("decode", *queries, *reads, *options, element, cpu_threads())
    else:
        from sglang_reasoncache.kernels import decode_triton

        decode_triton.decode(kv, query, out, plan, spans, *options)
    return out
