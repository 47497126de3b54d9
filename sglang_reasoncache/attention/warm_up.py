# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels that the first forwards would wait for, some seconds. Nothing is written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import gather_kv
from sglang_reasoncache.selection.page_selection import PageSelection

if TYPE_CHECKING:
    from sglang_reasoncache.attention.paged import PagedAttention
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers


def compile_attention(paged: PagedAttention) -> None:
    entries = 8
    plan = paged.readable(_plan_of_row_0(paged, entries).plan_of(1))
    merged = plan
    if paged.merges:
        merged = _plan_of_row_0(paged, entries, merge=True).plan_of(1)
    spans = (plan.kv_indptr[:1].clone(), plan.kv_indptr[1:].clone())
    shapes = {(x.tp_q_head_num, x.qk_head_dim, x.logit_cap): x for x in paged.attention_layers}
    for (heads, dim, logit_cap), layer in shapes.items():
        kv, query = paged.pools[layer.layer_id], _zeros(paged, heads, dim)
        # Triton compiles a kernel twice: for addresses that are multiples of 16 bytes and for others.
        for some, rows in ((None, merged), (spans, plan)):
            decode_attention(query, kv, rows, scale=1.0, logit_cap=logit_cap, spans=some)
        for first in (0, 1):
            shift = None if plan.shift is None else plan.shift[first:]
            gather_kv(kv, plan.kv_indices[first:], shift, query.dtype)


def compile_selection(paged: PagedAttention, selection: PageSelection) -> None:
    # The last layer of each shape, because the first layers may read everything.
    alike = {(layer.tp_q_head_num, layer.qk_head_dim): layer for layer in paged.attention_layers}
    queries = {layer.layer_id: _zeros(paged, *shape) for shape, layer in alike.items()}
    selection.warm_up(_plan_of_row_0(paged, paged.width), queries)


def _plan_of_row_0(paged: PagedAttention, length: int, *, merge: bool = False) -> PlanBuffers:
    """Row 0 belongs to no request."""
    zero = torch.zeros(1, dtype=torch.int64, device=paged.device)
    buffers = paged.buffers(1, length, merge=merge)
    paged.plan_into(buffers, zero, zero + length)
    return buffers


def _zeros(paged: PagedAttention, heads: int, dim: int) -> Tensor:
    return torch.zeros((1, heads, dim), dtype=paged.dtype, device=paged.device)
