# SPDX-License-Identifier: Apache-2.0
"""Copies entries of a pool to contiguous K and V on a GPU, and rotates each copied key by its shift."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.paged import PagedKv

#: Number of elements that a program holds at once.
TILE = 4096


@triton.jit(do_not_specialize=["count", "num_slots", "table_rows"])
def gather_kernel(
    keys,  # [num_slots, heads, K_DIM]
    values,  # [num_slots, heads, V_DIM]
    kv_indices,  # int32 [count]
    shift,  # int32 [count], read only if HALF > 0
    cosines,  # fp32 [table_rows, HALF], read only if HALF > 0
    sines,
    table_rows,
    out_k,  # [heads, count, K_DIM]
    out_v,  # [heads, count, V_DIM]
    count,
    num_slots,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    ELEMENT: tl.constexpr,
    HALF: tl.constexpr,  # 0: nothing is shifted
    NEOX: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (cdiv(count, ROWS), heads)."""
    head = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = entry < count
    slot, ok = common.load_slots(kv_indices, entry, inside, num_slots)
    if HALF > 0:
        by = tl.load(shift + entry, mask=ok, other=0)
        ok &= (by > -table_rows) & (by < table_rows)
    column = tl.arange(0, K_COLS)[None, :]
    at = keys + (slot * k_slot_stride + head * k_head_stride)[:, None]
    mask = ok[:, None] & (column < K_DIM)
    k = common.load_fp32(at + column, mask, ELEMENT)
    if HALF > 0:
        k = common.rotate_tile(k, at, column, mask, by, ok, cosines, sines, ELEMENT, HALF, NEOX)
    row = (head * count + entry)[:, None]
    mask = inside[:, None] & (column < K_DIM)
    tl.store(out_k + row * K_DIM + column, k.to(out_k.dtype.element_ty), mask=mask)
    column = tl.arange(0, V_COLS)[None, :]
    at = values + (slot * v_slot_stride + head * v_head_stride)[:, None]
    v = common.load_fp32(at + column, ok[:, None] & (column < V_DIM), ELEMENT)
    mask = inside[:, None] & (column < V_DIM)
    tl.store(out_v + row * V_DIM + column, v.to(out_v.dtype.element_ty), mask=mask)


def gather(
    kv: PagedKv, kv_indices: Tensor, shift: Tensor | None, out_k: Tensor, out_v: Tensor
) -> None:
    """See :func:`sglang_reasoncache.kernels.extend.gather_kv`. Does not wait for the device."""
    count = len(kv_indices)
    if not count:
        return
    keys = kv.keys
    values = kv.values
    rotation = None if shift is None else kv.rotation
    shift, cosines, sines, table_rows = common.rotary_arguments(shift, rotation, kv_indices, out_k)
    k_cols = triton.next_power_of_2(keys.shape[2])
    v_cols = triton.next_power_of_2(values.shape[2])
    rows = max(1, TILE // max(k_cols, v_cols))
    with common.current_device(keys.device):
        gather_kernel[(triton.cdiv(count, rows), keys.shape[1])](
            keys=common.as_read(keys),
            values=common.as_read(values),
            kv_indices=kv_indices,
            shift=shift,
            cosines=cosines,
            sines=sines,
            table_rows=table_rows,
            out_k=out_k,
            out_v=out_v,
            count=count,
            num_slots=keys.shape[0],
            k_slot_stride=keys.stride(0),
            k_head_stride=keys.stride(1),
            v_slot_stride=values.stride(0),
            v_head_stride=values.stride(1),
            ELEMENT=common.ELEMENT[keys.dtype],
            **common.rotary_constants(rotation),
            K_DIM=keys.shape[2],
            V_DIM=values.shape[2],
            K_COLS=k_cols,
            V_COLS=v_cols,
            ROWS=rows,
        )
