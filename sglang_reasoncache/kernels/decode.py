# SPDX-License-Identifier: Apache-2.0
"""Paged decode attention with grouped query heads. Keys may be used at positions they were not cached for."""

import torch

from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.row_plan import RowPlan
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
    sees: torch.Tensor | None = None,
    reach: int = 0,
) -> torch.Tensor:
    """Compute ``softmax(scale * q . k) v`` for each query over its entries: slots that the plan lists for it.

    A *shifted* key was cached for another position. It is not rotated; the query is rotated back instead, so
    the cost grows with the number of runs of entries with equal shifts. An entry is read once, even if a merged
    plan uses its key at several positions. The result does not depend on the number of threads or on the rest
    of the batch. On a CUDA device the call only launches kernels, and can be captured in a graph.

    Args:
        query: ``[batch, heads, query_dim]`` on the pool's device, fp32, bf16 or fp16.
        kv: Keys and values; query head h reads KV head ``h // (heads / kv_heads)``.
        plan: The entries of each request. Without ``spans``, query i reads the entries of request i.
        scale: Factor of the logits.
        logit_cap: Replaces each logit by ``cap * tanh(logit / cap)``; 0 leaves logits as they are.
        sinks: fp32 ``[heads]``, an extra logit per head, which counts in the softmax's sum but has no value.
        spans: For each query, the index of its first entry and one past its last; int32 ``[batch]`` each.
            Several queries may read the same entries. ``spans`` must be None if the plan has rotations.
        sees: For requests with ``new`` queries each, from 2 to 64, as in the verification of drafted tokens;
            int64 ``[batch, new]``. A request's last ``new`` entries are its *new* entries, one per query. A
            query sees all entries before these, and the i-th of these if its bit i is set. ``query`` then has
            ``batch * new`` rows. Backend "triton" only; without ``spans``.
        reach: With ``sees``: how many positions a query sees, its own included; 0: all. A query's position is
            that of the request's first new entry, plus the number of new entries that it sees, less one. A
            request then has one entry for each of its last ``reach + new - 1`` positions, or for all that
            there are; the plan must not be merged. Without ``sees`` the plan alone tells what a query sees.

    Returns:
        ``[batch, heads, v_dim]`` of the query's dtype (``[batch * new, ...]`` with ``sees``); zeros for a query
        without entries.

    Raises:
        ValueError: wrong dtype, shape or device; shifted entries, but no rotation in ``kv``; ``reach`` without
            ``sees``, or with a merged plan; with the backend
            "native" also a slot, span or shift out of range. The backend "triton" skips such entries.
    """
    kv.check(plan.shift, query.dtype)
    if plan.rotations is not None:
        kv.check(plan.rotations.by, query.dtype)
    begin, end = (plan.kv_indptr[:-1], plan.kv_indptr[1:]) if spans is None else spans
    batch = begin.shape[0]
    if sees is not None:
        if spans is not None or kv.native is not None or sees.shape[:1] != (batch,):
            raise ValueError(
                f"sees must be [{batch}, new], without spans, for the backend triton, got "
                f"{list(sees.shape)} for {kv.backend}"
            )
        batch *= sees.shape[1]
    if reach and (sees is None or plan.rotations is not None):
        raise ValueError("reach needs sees, and a plan that is not merged")
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
    begin = begin.contiguous()
    end = end.contiguous()
    sinks = None if sinks is None else sinks.contiguous()
    if kv.native is not None:
        rotations = plan.rotations
        kv.native.call(
            "decode",
            query,
            out,
            batch,
            heads,
            query.stride(0),
            query.stride(1),
            begin,
            end,
            plan.kv_indices,
            plan.shift,
            len(plan.kv_indices),
            None if rotations is None else rotations.tile_ptr,
            None if rotations is None else rotations.by,
            None if rotations is None else rotations.bits,
            0 if rotations is None else len(rotations.by),
            sinks,
            float(scale),
            float(logit_cap),
            DTYPES.index(query.dtype),
            cpu_threads(),
        )
    else:
        from sglang_reasoncache.kernels import decode_triton

        decode_triton.decode(
            kv,
            query,
            out,
            plan,
            (begin, end),
            sinks,
            float(scale),
            float(logit_cap),
            None if sees is None else sees.contiguous(),
            reach,
        )
    return out
