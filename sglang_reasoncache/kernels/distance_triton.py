# SPDX-License-Identifier: Apache-2.0
"""KV distance on a GPU: one program per pair, layer and side reads both blocks once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels.common_triton import (
    ELEMENT,
    current_device,
    load_fp32,
    rotary_arguments,
    rotary_constants,
)

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: Elements of a block that a program holds at once.
TILE = 2048


@triton.jit
def _pointer(bases, index, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(bases + index)
    if ELEMENT == "fp32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif ELEMENT == "bf16":
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    elif ELEMENT == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _nothing(ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sums before the first tile, and no row that is out of range."""
    zeros = tl.zeros([ROWS, COLS], tl.float32)
    return zeros, zeros, zeros, tl.zeros([ROWS], tl.int32)


@triton.jit
def _totals(a, b, c, bad):
    a, b, c = tl.sum(a, axis=1), tl.sum(b, axis=1), tl.sum(c, axis=1)
    return tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(c, axis=0), tl.max(bad)


@triton.jit
def _add(a, b, c, x, y, MOMENTS: tl.constexpr):
    """Running sums: squared differences in ``a``, or |x|^2, |y|^2, x.y in all three."""
    if MOMENTS:
        return a + x * x, b + y * y, c + x * y
    difference = x - y
    return a + difference * difference, b, c


@triton.jit
def _rows(
    dst, src, start, block, num_slots, slot_stride, head_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Offsets of some rows (a token's head each) of both blocks, their tokens, which of them can
    be read, and which of them name a slot outside the pool."""
    row = start + tl.arange(0, ROWS)
    inside = row < block * HEADS
    token = row // HEADS
    head = (row % HEADS) * head_stride
    x = tl.load(dst + token, mask=inside, other=0)
    y = tl.load(src + token, mask=inside, other=0)
    ok = inside & (x >= 0) & (x < num_slots) & (y >= 0) & (y < num_slots)
    return x * slot_stride + head, y * slot_stride + head, token, ok, inside & ~ok


@triton.jit
def _plain(
    base, dst, src, block, num_slots, slot_stride, head_stride,
    ELEMENT: tl.constexpr, MOMENTS: tl.constexpr, HEADS: tl.constexpr, FIRST: tl.constexpr,
    DIM: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums over elements [FIRST, DIM) of every token and head, as cached."""
    columns = FIRST + tl.arange(0, COLS)
    a, b, c, bad = _nothing(ROWS, COLS)
    for start in range(0, block * HEADS, ROWS):
        x_at, y_at, _, ok, outside = _rows(
            dst, src, start, block, num_slots, slot_stride, head_stride, HEADS, ROWS
        )
        bad |= outside.to(tl.int32)
        mask = ok[:, None] & (columns < DIM)[None, :]
        x = load_fp32(base + x_at[:, None] + columns[None, :], mask, ELEMENT)
        y = load_fp32(base + y_at[:, None] + columns[None, :], mask, ELEMENT)
        a, b, c = _add(a, b, c, x, y, MOMENTS)
    return _totals(a, b, c, bad)


@triton.jit
def _pairs(
    at, ok, ELEMENT: tl.constexpr, HALF: tl.constexpr, NEOX: tl.constexpr,
    COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Elements of some rows that are rotated together: the first ones, and those paired with."""
    if NEOX:
        angle = tl.arange(0, COLS)[None, :]
        mask = ok[:, None] & (angle < HALF)
        return load_fp32(at + angle, mask, ELEMENT), load_fp32(at + HALF + angle, mask, ELEMENT)
    both = tl.arange(0, 2 * COLS)[None, :]
    found = load_fp32(at + both, ok[:, None] & (both < 2 * HALF), ELEMENT)
    return tl.split(tl.reshape(found, [ROWS, COLS, 2]))


@triton.jit
def _rotated(
    base, dst, src, shift, cosines, sines, table_rows, block, num_slots, slot_stride, head_stride,
    ELEMENT: tl.constexpr, MOMENTS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    NEOX: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums over elements [0, 2 HALF) of every token and head, the source rotated by its shift."""
    angle = tl.arange(0, COLS)
    a, b, c, bad = _nothing(ROWS, COLS)
    for start in range(0, block * HEADS, ROWS):
        x_row, y_row, token, ok, outside = _rows(
            dst, src, start, block, num_slots, slot_stride, head_stride, HEADS, ROWS
        )
        by = tl.load(shift + token, mask=ok, other=0).to(tl.int64)
        distance = tl.abs(by)
        bad |= (outside | (distance >= table_rows)).to(tl.int32)
        ok &= distance < table_rows
        mask = ok[:, None] & (angle < HALF)[None, :]
        entry = (distance * HALF)[:, None] + angle[None, :]
        cosine = tl.load(cosines + entry, mask=mask, other=0.0)
        sine = tl.load(sines + entry, mask=mask, other=0.0)
        sine = tl.where((by < 0)[:, None], -sine, sine)
        x0, x1 = _pairs(base + x_row[:, None], ok, ELEMENT, HALF, NEOX, COLS, ROWS)
        y0, y1 = _pairs(base + y_row[:, None], ok, ELEMENT, HALF, NEOX, COLS, ROWS)
        # An entry without a shift stays as it is: inf * 0 would be NaN.
        still = (by == 0)[:, None]
        z0 = tl.where(still, y0, y0 * cosine - y1 * sine)
        z1 = tl.where(still, y1, y1 * cosine + y0 * sine)
        a, b, c = _add(a, b, c, x0, z0, MOMENTS)
        a, b, c = _add(a, b, c, x1, z1, MOMENTS)
    return _totals(a, b, c, bad)


@triton.jit
def _store(out, unit, a, b, c, bad, MOMENTS: tl.constexpr):
    """fp64; NaN for a block that names a slot or shift out of range."""
    poison = tl.where(bad > 0, float("nan"), 0.0)
    if MOMENTS:
        tl.store(out + unit * 3, (a + poison).to(tl.float64))
        tl.store(out + unit * 3 + 1, (b + poison).to(tl.float64))
        tl.store(out + unit * 3 + 2, (c + poison).to(tl.float64))
    else:
        tl.store(out + unit, (a + poison).to(tl.float64))


@triton.jit
def distance_kernel(
    bases,  # int64 [layers, 2]: addresses of K and V
    dst,  # int64 [pairs, block]
    src,  # int64 [pairs, block]
    shift,  # int32 [pairs, block], unused unless HALF
    cosines,  # fp32 [table_rows, HALF], unused unless HALF
    sines,
    table_rows,
    out,  # fp64 [pairs, layers, 2], or [pairs, layers, 2, 3] of MOMENTS
    block,
    num_slots,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,  # every base is a multiple of 16 bytes
    MOMENTS: tl.constexpr,
    HALF: tl.constexpr,  # 0: nothing is rotated
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    REST: tl.constexpr,  # columns of a tile of keys that are not rotated
    V_COLS: tl.constexpr,
    HALF_COLS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (pairs, layers, 2)."""
    pair = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    side = tl.program_id(2)
    dst += pair * block
    src += pair * block
    unit = (pair * tl.num_programs(1) + layer) * 2 + side
    base = _pointer(bases, layer * 2 + side, ELEMENT, ALIGNED)
    a = 0.0
    b = 0.0
    c = 0.0
    bad = 0
    if side == 0:
        if HALF > 0:
            a, b, c, bad = _rotated(
                base, dst, src, shift + pair * block, cosines, sines, table_rows, block, num_slots,
                k_slot_stride, k_head_stride, ELEMENT, MOMENTS, HEADS, HALF, NEOX, HALF_COLS,
                max(1, TILE // (2 * HALF_COLS)),
            )  # fmt: skip
        if REST > 0:
            p, q, r, worse = _plain(
                base, dst, src, block, num_slots, k_slot_stride, k_head_stride, ELEMENT, MOMENTS,
                HEADS, 2 * HALF, K_DIM, REST, max(1, TILE // REST),
            )  # fmt: skip
            a += p
            b += q
            c += r
            bad |= worse
    else:
        a, b, c, bad = _plain(
            base, dst, src, block, num_slots, v_slot_stride, v_head_stride, ELEMENT, MOMENTS,
            HEADS, 0, V_DIM, V_COLS, max(1, TILE // V_COLS),
        )  # fmt: skip
    _store(out, unit, a, b, c, bad, MOMENTS)


def constants(
    layer: tuple[torch.Tensor, torch.Tensor],
    rotation: KeyRotation | None,
    *,
    aligned: bool,
    moments: bool,
) -> dict[str, Any]:
    """Compile-time arguments of :func:`distance_kernel`; ``rotation`` only if keys are rotated."""
    keys, values = layer
    rotary = rotary_constants(rotation)
    half = rotary["HALF"]
    rest = keys.shape[2] - 2 * half
    return dict(
        ELEMENT=ELEMENT[keys.dtype],
        ALIGNED=aligned,
        MOMENTS=moments,
        **rotary,
        HEADS=keys.shape[1],
        K_DIM=keys.shape[2],
        V_DIM=values.shape[2],
        REST=triton.next_power_of_2(rest) if rest else 0,
        V_COLS=triton.next_power_of_2(values.shape[2]),
        HALF_COLS=triton.next_power_of_2(half) if half else 0,
        TILE=TILE,
    )


class TritonDistance:
    """Launches one kernel a call and waits for nothing.

    Args:
        layers: Keys and values of every layer on one device, elements of a head side by side.
        rotation: The model's rotation on that device, None to compare as cached only.
    """

    def __init__(
        self, layers: Sequence[tuple[torch.Tensor, torch.Tensor]], rotation: KeyRotation | None
    ) -> None:
        self._layers, self._rotation = layers, rotation
        addresses = [[buffer.data_ptr() for buffer in layer] for layer in layers]
        self._bases = torch.tensor(addresses, dtype=torch.int64, device=layers[0][0].device)
        self._aligned = all(address % 16 == 0 for layer in addresses for address in layer)

    def sums(
        self,
        dst_slots: torch.Tensor,
        src_slots: torch.Tensor,
        shift: torch.Tensor | None,
        moments: bool,
    ) -> torch.Tensor:
        """fp64 ``[pairs, num_layers, 2]``, with ``moments`` ``[pairs, num_layers, 2, 3]``.

        Arguments: see ``DistanceKernel``, contiguous. A pair with a slot or shift out of range
        comes out as NaN.
        """
        pairs, block = dst_slots.shape
        shape = (pairs, len(self._layers), 2, *[3] * moments)
        out = torch.empty(shape, dtype=torch.float64, device=dst_slots.device)
        keys, values = self._layers[0]
        rotation = None if shift is None else self._rotation
        if not pairs:
            return out
        with current_device(dst_slots.device):
            distance_kernel[(pairs, len(self._layers), 2)](
                self._bases,
                dst_slots,
                src_slots,
                *rotary_arguments(shift, rotation, dst_slots, self._bases),
                out,
                block,
                keys.shape[0],
                *keys.stride()[:2],
                *values.stride()[:2],
                **constants(self._layers[0], rotation, aligned=self._aligned, moments=moments),
            )
        return out
