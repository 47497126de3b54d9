# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels, so that the first forwards do not wait seconds for them. The pool is only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import gather_kv

if TYPE_CHECKING:
    from sglang_reasoncache.attention.paged import PagedAttention


def compile_attention(paged: PagedAttention) -> None:
    # Row 0 belongs to no request.
    zero = torch.zeros(1, dtype=torch.int64, device=paged.device)
    plan, merged = (
        paged.plan_into(paged.buffers(1, 8, merge=merge), zero, zero + 8)
        for merge in (False, paged.merges)
    )
    spans = (plan.kv_indptr[:1].clone(), plan.kv_indptr[1:].clone())
    shapes = {(x.tp_q_head_num, x.qk_head_dim, x.logit_cap): x for x in paged.attention_layers}
    for (heads, dim, logit_cap), layer in shapes.items():
        kv = paged.pools[layer.layer_id]
        query = torch.zeros((1, heads, dim), dtype=paged.dtype, device=paged.device)
        # Triton compiles a kernel twice: for addresses that are multiples of 16 bytes and for others.
        for some, rows in ((None, merged), (spans, plan)):
            decode_attention(query, kv, rows, scale=1.0, logit_cap=logit_cap, spans=some)
        for first in (0, 1):
            shift = None if plan.shift is None else plan.shift[first:]
            gather_kv(kv, plan.kv_indices[first:], shift, query.dtype)
