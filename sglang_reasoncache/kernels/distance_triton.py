# SPDX-License-Identifier: Apache-2.0
"""KV distance of block pairs on a GPU: one program per pair, layer and side (K or V) reads both blocks once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.rotation import KeyRotation

#: Number of elements of each block that a program loads at a time.
TILE = 2048


@triton.jit
def _pairs(
    at,
    ok,
    ELEMENT: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """For some rows (a token and a head each), load the elements that are rotated in pairs: the first element
    of every pair, and the second element of every pair."""
    if NEOX:
        angle = tl.arange(0, COLS)[None, :]
        mask = ok[:, None] & (angle < HALF)
        first = common.load_fp32(at + angle, mask, ELEMENT)
        return first, common.load_fp32(at + HALF + angle, mask, ELEMENT)
    both = tl.arange(0, 2 * COLS)[None, :]
    elements = common.load_fp32(at + both, ok[:, None] & (both < 2 * HALF), ELEMENT)
    return tl.split(tl.reshape(elements, [ROWS, COLS, 2]))


@triton.jit
def _squares(
    base,
    dst,
    src,
    shift,
    cosines,
    sines,
    table_rows,
    block,
    num_slots,
    slot_stride,
    head_stride,
    ELEMENT: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sum of squared differences between two blocks in one buffer. The sum is NaN if a slot or shift is out of
    range. If HALF > 0, elements [0, 2 HALF) of every head are compared, after those of ``src`` are rotated by
    ``shift``. If HALF is 0, elements [FIRST, DIM) are compared as cached."""
    column = FIRST + tl.arange(0, COLS)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    bad = tl.zeros([ROWS], tl.int32)
    for start in range(0, block * HEADS, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < block * HEADS
        token = row // HEADS
        head = (row % HEADS) * head_stride
        x_slot = tl.load(dst + token, mask=inside, other=0)
        y_slot = tl.load(src + token, mask=inside, other=0)
        ok = inside & (x_slot >= 0) & (x_slot < num_slots) & (y_slot >= 0) & (y_slot < num_slots)
        x_at = base + (x_slot * slot_stride + head)[:, None]
        y_at = base + (y_slot * slot_stride + head)[:, None]
        if HALF > 0:
            by = tl.load(shift + token, mask=ok, other=0)
            ok &= (by > -table_rows) & (by < table_rows)
            mask = ok[:, None] & (column < HALF)
            cosine, sine = common.load_factors(
                cosines, sines, by[:, None], True, False, column, mask, HALF
            )
            x0, x1 = _pairs(x_at, ok, ELEMENT, HALF, NEOX, COLS, ROWS)
            y0, y1 = _pairs(y_at, ok, ELEMENT, HALF, NEOX, COLS, ROWS)
            # A key with shift 0 keeps its value: rotation would multiply by the sine 0, and inf * 0 is NaN.
            still = (by == 0)[:, None]
            first = x0 - tl.where(still, y0, y0 * cosine - y1 * sine)
            total += first * first
            second = x1 - tl.where(still, y1, y1 * cosine + y0 * sine)
            total += second * second
        else:
            mask = ok[:, None] & (column < DIM)
            difference = common.load_fp32(x_at + column, mask, ELEMENT)
            difference -= common.load_fp32(y_at + column, mask, ELEMENT)
            total += difference * difference
        bad |= (inside & ~ok).to(tl.int32)
    return tl.where(tl.max(bad) > 0, float("nan"), tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def distance_kernel(
    keys,  # key buffer of any layer; only its dtype is used
    bases,  # int64 [layers, 2]: addresses of K and V
    dst,  # int64 [pairs, block]
    src,  # int64 [pairs, block]
    shift,  # int32 [pairs, block], read only if HALF > 0
    cosines,  # fp32 [table_rows, HALF], read only if HALF > 0
    sines,
    table_rows,
    out,  # fp64 [pairs, layers, 2]
    block,
    num_slots,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,  # whether all addresses in ``bases`` are multiples of 16
    HALF: tl.constexpr,  # 0: nothing is rotated
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    REST: tl.constexpr,  # number of key dims that are not rotated, rounded up to a power of 2
    V_COLS: tl.constexpr,
    HALF_COLS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (pairs, layers, 2). A program stores NaN if a slot or shift that it reads is out of range."""
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    side = tl.program_id(2)
    dst += pair * block
    src += pair * block
    shift += pair * block
    base = tl.load(bases + layer * 2 + side).to(keys.dtype)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    total = 0.0
    if side == 0:
        if HALF > 0:
            total += _squares(
                base,
                dst,
                src,
                shift,
                cosines,
                sines,
                table_rows,
                block,
                num_slots,
                k_slot_stride,
                k_head_stride,
                ELEMENT=ELEMENT,
                HEADS=HEADS,
                HALF=HALF,
                NEOX=NEOX,
                FIRST=0,
                DIM=2 * HALF,
                COLS=HALF_COLS,
                ROWS=max(1, TILE // (2 * HALF_COLS)),
            )
        if REST > 0:
            total += _squares(
                base,
                dst,
                src,
                shift,
                cosines,
                sines,
                table_rows,
                block,
                num_slots,
                k_slot_stride,
                k_head_stride,
                ELEMENT=ELEMENT,
                HEADS=HEADS,
                HALF=0,
                NEOX=NEOX,
                FIRST=2 * HALF,
                DIM=K_DIM,
                COLS=REST,
                ROWS=max(1, TILE // REST),
            )
    else:
        total += _squares(
            base,
            dst,
            src,
            shift,
            cosines,
            sines,
            table_rows,
            block,
            num_slots,
            v_slot_stride,
            v_head_stride,
            ELEMENT=ELEMENT,
            HEADS=HEADS,
            HALF=0,
            NEOX=NEOX,
            FIRST=0,
            DIM=V_DIM,
            COLS=V_COLS,
            ROWS=max(1, TILE // V_COLS),
        )
    tl.store(out + (pair * tl.num_programs(1) + layer) * 2 + side, total)


def constants(
    keys: Tensor, values: Tensor, rotation: KeyRotation | None, aligned: bool
) -> dict[str, Any]:
    """Compile-time arguments of :func:`distance_kernel`. ``rotation``: None if no key is rotated."""
    rotary = common.rotary_constants(rotation)
    half = rotary["HALF"]
    rest = keys.shape[2] - 2 * half
    return dict(
        ELEMENT=common.ELEMENT[keys.dtype],
        ALIGNED=aligned,
        **rotary,
        HEADS=keys.shape[1],
        K_DIM=keys.shape[2],
        V_DIM=values.shape[2],
        REST=triton.next_power_of_2(rest) if rest else 0,
        V_COLS=triton.next_power_of_2(values.shape[2]),
        HALF_COLS=triton.next_power_of_2(half) if half else 0,
        TILE=TILE,
    )


def addresses(layers: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, bool]:
    """Addresses of the buffers of K and V, int64 ``[layers, 2]`` on the pool's device, and whether all
    addresses are multiples of 16 bytes."""
    pointers = torch.tensor([[buffer.data_ptr() for buffer in layer] for layer in layers])
    aligned = not (pointers % 16).any().item()
    return pointers.to(layers[0][0].device), aligned


def squares(
    layers: Sequence[tuple[Tensor, Tensor]],
    addresses: tuple[Tensor, bool],
    rotation: KeyRotation | None,
    dst: Tensor,
    src: Tensor,
    shift: Tensor | None,
) -> Tensor:
    """Computes ``DistanceKernel.squares`` on a GPU with one launch, without waiting for the result. Arguments
    must be contiguous. A sum is NaN if it would use a slot or shift that is out of range."""
    pairs, block = dst.shape
    bases, aligned = addresses
    keys, values = layers[0]
    out = dst.new_empty((pairs, len(layers), 2), dtype=torch.float64)
    if not pairs:
        return out
    rotation = None if shift is None else rotation
    shift, cosines, sines, table_rows = common.rotary_arguments(shift, rotation, dst, bases)
    with common.current_device(dst.device):
        distance_kernel[(pairs, len(layers), 2)](
            keys=common.as_read(keys),
            bases=bases,
            dst=dst,
            src=src,
            shift=shift,
            cosines=cosines,
            sines=sines,
            table_rows=table_rows,
            out=out,
            block=block,
            num_slots=keys.shape[0],
            k_slot_stride=keys.stride(0),
            k_head_stride=keys.stride(1),
            v_slot_stride=values.stride(0),
            v_head_stride=values.stride(1),
            **constants(keys, values, rotation, aligned),
        )
    return out
