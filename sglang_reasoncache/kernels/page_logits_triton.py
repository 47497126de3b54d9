# SPDX-License-Identifier: Apache-2.0
"""Logits of pages on a GPU. PyTorch would first copy the bounds of all pages of all requests."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels import tile_triton as tiles


@triton.jit(do_not_specialize=["count", "num_pages"])
def logits_kernel(
    query,  # [batch, heads, DIM]
    bounds,  # [num_pages, kv_heads, DIM]
    pages,  # int64 [batch, count]
    out,  # fp32 [batch, heads, count], written
    count,
    num_pages,
    q_row_stride,
    q_head_stride,
    page_stride,
    head_stride,
    scale,
    ELEMENT: tl.constexpr,
    EXACT: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (cdiv(count, TILE), kv_heads * cdiv(GROUP, LINES), batch)."""
    blocks: tl.constexpr = (GROUP + LINES - 1) // LINES
    kv_head = tl.program_id(1) // blocks
    request = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) // blocks * GROUP
    member = tl.program_id(1) % blocks * LINES + tl.arange(0, LINES)
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    page, ok = common.load_slots(pages + request * count, place, place < count, num_pages)
    column = tl.arange(0, COLS)
    inside = (column < DIM)[None, :]
    q_at = query + request * q_row_stride + (head * q_head_stride)[:, None] + column[None, :]
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    at = bounds + (page * page_stride + kv_head * head_stride)[:, None] + column[None, :]
    bound = tl.load(at, mask=ok[:, None] & inside, other=0).T
    products = tiles.times(q, bound, tl.zeros([LINES, TILE], tl.float32), ELEMENT, EXACT)
    logits = tl.where(ok[None, :], products * scale, float("-inf"))
    to = out + ((request * heads + head) * count)[:, None] + place[None, :]
    tl.store(to, logits, mask=(member < GROUP)[:, None] & (place < count)[None, :])


def constants(query: torch.Tensor, bounds: torch.Tensor) -> dict[str, Any]:
    """Compile-time arguments of :func:`logits_kernel`."""
    columns = tiles.columns(query.shape[2])
    group = query.shape[1] // bounds.shape[1]
    return dict(
        ELEMENT=common.ELEMENT[bounds.dtype],
        EXACT=query.dtype == bounds.dtype,
        DIM=query.shape[2],
        COLS=columns,
        GROUP=group,
        LINES=tiles.lines(group, columns),
        TILE=tiles.tile(columns, bounds.element_size()),
    )


def page_logits(
    query: torch.Tensor, bounds: torch.Tensor, pages: torch.Tensor, scale: float
) -> torch.Tensor:
    """``scale * query . bounds`` of each page: fp32 ``[batch, heads, count]``, -inf where there is no page.
    Only launches a kernel, and can be captured in a graph.

    Args:
        query: ``[batch, heads, dim]``, contiguous.
        bounds: ``[num_pages, kv_heads, dim]``.
        pages: int64 ``[batch, count]``.
    """
    batch, heads, _ = query.shape
    count = pages.shape[1]
    fixed = constants(query, bounds)
    out = torch.empty((batch, heads, count), dtype=torch.float32, device=query.device)
    blocks = bounds.shape[1] * triton.cdiv(fixed["GROUP"], fixed["LINES"])
    if out.numel():
        with common.current_device(query.device):
            logits_kernel[triton.cdiv(count, fixed["TILE"]), blocks, batch](
                query,
                bounds,
                pages.contiguous(),
                out,
                count,
                len(bounds),
                query.stride(0),
                query.stride(1),
                bounds.stride(0),
                bounds.stride(1),
                scale,
                **fixed,
            )
    return out
