# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels of attention when a server starts."""

import itertools
from typing import Any

import torch

from sglang_reasoncache.attention.models import reach_of
from sglang_reasoncache.attention.paged import PagedAttention
from sglang_reasoncache.compat.types import AttentionLayer
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import gather_kv
from sglang_reasoncache.kernels.page_logits import page_logits
from sglang_reasoncache.kernels.paged import rotate_rows
from sglang_reasoncache.kernels.row_plan import RowPlan


def compile_attention(paged: PagedAttention, drafted: int = 0) -> None:
    """Compile the Triton kernels, so that the first forwards need not wait. Writes nothing to the pool.
    ``drafted``: how many drafted tokens of a request are verified in a step; 0 without speculation."""
    # The plans are for row 0, which belongs to no request.
    zero = torch.zeros(1, dtype=torch.int64, device=paged.device)
    plan = paged.plan_into(paged.buffers(1, 8), zero, zero + 8)
    merged = paged.plan_into(paged.buffers(1, 8, merge=paged.merges), zero, zero + 8)
    spans = (plan.kv_indptr[:1].clone(), plan.kv_indptr[1:].clone())
    sees = torch.ones((1, drafted), dtype=torch.int64, device=paged.device)
    # Layers of a window pool read plans without shifts.
    if paged.has_window_pool:
        windows = (reach_of(layer) for layer in paged.attention_layers if reach_of(layer))
        paged.plan_into(paged.buffers(1, 8), zero, zero + 8, next(windows))
    unshifted = RowPlan(plan.kv_indptr, plan.kv_indices, None)
    shapes = {
        (layer.tp_q_head_num, layer.qk_head_dim, layer.logit_cap, *_shape(paged, layer)): layer
        for layer in paged.attention_layers
    }
    for (heads, dim, logit_cap, *_), layer in shapes.items():
        kv = paged.pools[layer.layer_id]
        query = torch.zeros((1, heads, dim), dtype=paged.dtype, device=paged.device)
        # Pass both kinds of addresses: Triton compiles a kernel once for multiples of 16 and once for others.
        decode_attention(query, kv, merged, scale=1.0, logit_cap=logit_cap)
        decode_attention(query, kv, plan, scale=1.0, logit_cap=logit_cap, spans=spans)
        sinks = torch.zeros(heads, dtype=torch.float32, device=paged.device)
        if paged.has_windows:
            # Of the models that have windows, some have sinks.
            decode_attention(query, kv, plan, scale=1.0, logit_cap=logit_cap, sinks=sinks)
        if paged.has_window_pool:
            for of_layer in (plan, unshifted):
                for of_spans, of_sinks in itertools.product((spans, None), (sinks, None)):
                    decode_attention(
                        query,
                        kv,
                        of_layer,
                        scale=1.0,
                        logit_cap=logit_cap,
                        spans=of_spans,
                        sinks=of_sinks,
                    )
        if drafted:
            queries = query.expand(drafted, -1, -1).contiguous()
            verifications: list[tuple[RowPlan, int]] = [(merged, 0), (plan, 0)]
            if paged.has_windows:
                # How many positions a token sees is no constant of a kernel, only whether it sees all.
                verifications.append((unshifted if paged.has_window_pool else plan, drafted + 1))
            of_heads: list[torch.Tensor | None] = [None]
            if paged.has_windows:
                of_heads.append(sinks)
            for (each, reach), of_sinks in itertools.product(verifications, of_heads):
                decode_attention(
                    queries,
                    kv,
                    each,
                    scale=1.0,
                    logit_cap=logit_cap,
                    sinks=of_sinks,
                    sees=sees,
                    reach=reach,
                )
        if paged.selection is not None and layer.layer_id in paged.selection.bounds:
            bounds = paged.selection.bounds[layer.layer_id]
            page_logits(query, bounds[:-1], zero[None], 1.0, backend=paged.backend)
        if paged.latent and kv.rotation is not None and plan.shift is not None:
            fetched = torch.zeros((1, 1, kv.keys.shape[2]), dtype=paged.dtype, device=paged.device)
            rotate_rows(kv, fetched, plan.shift[:1])
        for first in (0, 1):
            shift = None if plan.shift is None else plan.shift[first:]
            gather_kv(kv, plan.kv_indices[first:], shift, query.dtype)
            if paged.has_window_pool:
                gather_kv(kv, plan.kv_indices[first:], None, query.dtype)


def _shape(paged: PagedAttention, layer: AttentionLayer) -> tuple[Any, ...]:
    """What else the kernels are compiled for: KV heads, dims of values, rotated dims and their pairing."""
    kv = paged.pools[layer.layer_id]
    rotated = () if kv.rotation is None else (kv.rotation.rotary_dim, kv.rotation.is_neox)
    return (kv.num_heads, kv.values.shape[2], *rotated)
