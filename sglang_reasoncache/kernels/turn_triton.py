# SPDX-License-Identifier: Apache-2.0
"""Rotates copies of fetched keys on a GPU, each by its shift."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.rotation import KeyRotation

#: Number of elements that a program holds at once.
TILE = 4096


@triton.jit(do_not_specialize=["count", "table_rows"])
def turn_kernel(
    keys,  # [count, DIM]
    shift,  # int32 [count]
    cosines,  # fp32 [table_rows, HALF]
    sines,
    table_rows,
    out_k,  # [count, DIM]
    count,
    slot_stride,
    ELEMENT: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (cdiv(count, ROWS),). A key whose shift is not in the table becomes 0."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = entry < count
    by = tl.load(shift + entry, mask=inside, other=0)
    column = tl.arange(0, COLS)[None, :]
    at = keys + (entry * slot_stride)[:, None]
    known = inside & (by > -table_rows) & (by < table_rows)
    mask = known[:, None] & (column < DIM)
    k = common.load_fp32(at + column, mask, ELEMENT)
    k = common.rotate_tile(k, at, column, mask, by, known, cosines, sines, ELEMENT, HALF, NEOX)
    mask = inside[:, None] & (column < DIM)
    tl.store(out_k + (entry * DIM)[:, None] + column, k.to(out_k.dtype.element_ty), mask=mask)


def turn(keys: Tensor, shift: Tensor, rotation: KeyRotation) -> Tensor:
    """``keys`` ``[n, 1, dims]``, whose dims are contiguous, rotated by ``shift``, int32 ``[n]``. Does not wait
    for the device."""
    count, _, dims = keys.shape
    out = torch.empty(keys.shape, dtype=keys.dtype, device=keys.device)
    if not count:
        return out
    columns = triton.next_power_of_2(dims)
    rows = max(1, TILE // columns)
    with common.current_device(keys.device):
        turn_kernel[(triton.cdiv(count, rows),)](
            keys=keys,
            shift=shift.contiguous(),
            cosines=rotation.cos,
            sines=rotation.sin,
            table_rows=len(rotation.cos),
            out_k=out,
            count=count,
            slot_stride=keys.stride(0),
            ELEMENT=common.ELEMENT[keys.dtype],
            **common.rotary_constants(rotation),
            DIM=dims,
            COLS=columns,
            ROWS=rows,
        )
    return out
