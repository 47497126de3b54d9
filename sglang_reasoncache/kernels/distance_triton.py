# SPDX-License-Identifier: Apache-2.0
"""KV distance on a GPU: one program per pair, layer and side reads both blocks once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels.rotate_triton import ELEMENT as _ELEMENT
from sglang_reasoncache.kernels.rotate_triton import current_device
from sglang_reasoncache.kernels.rotate_triton import load_fp32 as _load

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: Elements of a block that a program holds at once.
TILE = 2048
NUM_WARPS = 4


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
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _add(a, b, c, x, y, MOMENTS: tl.constexpr):
    """Running sums: squared differences in ``a``, or |x|^2, |y|^2, x.y in all three."""
    if MOMENTS:
        return a + x * x, b + y * y, c + x * y
    difference = x - y
    return a + difference * difference, b, c


@triton.jit
def _locate(slots, entries, inside, num_slots):
    """Slots of some rows, and which of the rows can be read."""
    slot = tl.load(slots + entries, mask=inside, other=0)
    return slot, inside & (slot >= 0) & (slot < num_slots)


@triton.jit
def _plain(
    base,
    dst,
    src,
    block,
    num_slots,
    slot_stride,
    head_stride,
    ELEMENT: tl.constexpr,
    MOMENTS: tl.constexpr,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    DIM: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums over elements [FIRST, DIM) of every token and head, as cached."""
    columns = FIRST + tl.arange(0, COLS)
    a = tl.zeros([ROWS, COLS], tl.float32)
    b = tl.zeros([ROWS, COLS], tl.float32)
    c = tl.zeros([ROWS, COLS], tl.float32)
    bad = tl.zeros([ROWS], tl.int32)
    for start in range(0, block * HEADS, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < block * HEADS
        token = row // HEADS
        offset = ((row % HEADS) * head_stride)[:, None] + columns[None, :]
        dst_slot, dst_ok = _locate(dst, token, inside, num_slots)
        src_slot, src_ok = _locate(src, token, inside, num_slots)
        bad |= (inside & ~(dst_ok & src_ok)).to(tl.int32)
        mask = (dst_ok & src_ok)[:, None] & (columns < DIM)[None, :]
        x = _load(base + (dst_slot * slot_stride)[:, None] + offset, mask, ELEMENT)
        y = _load(base + (src_slot * slot_stride)[:, None] + offset, mask, ELEMENT)
        a, b, c = _add(a, b, c, x, y, MOMENTS)
    return _total(a), _total(b), _total(c), tl.max(bad)


@triton.jit
def _rotated(
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
    MOMENTS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Sums over elements [0, 2 HALF) of every token and head, the source rotated by its shift."""
    angle = tl.arange(0, COLS)
    both = tl.arange(0, 2 * COLS)
    a = tl.zeros([ROWS, COLS], tl.float32)
    b = tl.zeros([ROWS, COLS], tl.float32)
    c = tl.zeros([ROWS, COLS], tl.float32)
    bad = tl.zeros([ROWS], tl.int32)
    for start in range(0, block * HEADS, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < block * HEADS
        token = row // HEADS
        at = ((row % HEADS) * head_stride)[:, None]
        dst_slot, dst_ok = _locate(dst, token, inside, num_slots)
        src_slot, src_ok = _locate(src, token, inside, num_slots)
        by = tl.load(shift + token, mask=inside, other=0).to(tl.int64)
        turns = tl.abs(by)
        ok = dst_ok & src_ok & (turns < table_rows)
        bad |= (inside & ~ok).to(tl.int32)
        mask = ok[:, None] & (angle < HALF)[None, :]
        entry = (turns * HALF)[:, None] + angle[None, :]
        cosine = tl.load(cosines + entry, mask=mask, other=0.0)
        sine = tl.load(sines + entry, mask=mask, other=0.0)
        sine = tl.where((by < 0)[:, None], -sine, sine)
        x_at = base + (dst_slot * slot_stride)[:, None] + at
        y_at = base + (src_slot * slot_stride)[:, None] + at
        if NEOX:
            x0 = _load(x_at + angle[None, :], mask, ELEMENT)
            x1 = _load(x_at + (HALF + angle)[None, :], mask, ELEMENT)
            y0 = _load(y_at + angle[None, :], mask, ELEMENT)
            y1 = _load(y_at + (HALF + angle)[None, :], mask, ELEMENT)
        else:
            wide = ok[:, None] & (both < 2 * HALF)[None, :]
            x = _load(x_at + both[None, :], wide, ELEMENT)
            y = _load(y_at + both[None, :], wide, ELEMENT)
            x0, x1 = tl.split(tl.reshape(x, [ROWS, COLS, 2]))
            y0, y1 = tl.split(tl.reshape(y, [ROWS, COLS, 2]))
        # An entry that stays where it is stays as it is: inf * 0 would be NaN.
        still = (by == 0)[:, None]
        z0 = tl.where(still, y0, y0 * cosine - y1 * sine)
        z1 = tl.where(still, y1, y1 * cosine + y0 * sine)
        a, b, c = _add(a, b, c, x0, z0, MOMENTS)
        a, b, c = _add(a, b, c, x1, z1, MOMENTS)
    return _total(a), _total(b), _total(c), tl.max(bad)


@triton.jit
def _total(sums):
    return tl.sum(tl.sum(sums, axis=1), axis=0)


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
    shift,  # int32 [pairs, block], unused unless TURNED
    cosines,  # fp32 [table_rows, HALF], unused unless TURNED
    sines,
    out,  # fp64 [pairs, layers, 2], or [pairs, layers, 2, 3] of MOMENTS
    table_rows,
    block,
    num_slots,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,  # every base is a multiple of 16 bytes
    MOMENTS: tl.constexpr,
    TURNED: tl.constexpr,
    NEOX: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HALF: tl.constexpr,
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
    if side == 0:
        base = _pointer(bases, layer * 2, ELEMENT, ALIGNED)
        a = 0.0
        b = 0.0
        c = 0.0
        bad = 0
        if TURNED:
            a, b, c, bad = _rotated(
                base,
                dst,
                src,
                shift + pair * block,
                cosines,
                sines,
                table_rows,
                block,
                num_slots,
                k_slot_stride,
                k_head_stride,
                ELEMENT,
                MOMENTS,
                HEADS,
                HALF,
                NEOX,
                HALF_COLS,
                max(1, TILE // (2 * HALF_COLS)),
            )
        if REST > 0:
            p, q, r, worse = _plain(
                base,
                dst,
                src,
                block,
                num_slots,
                k_slot_stride,
                k_head_stride,
                ELEMENT,
                MOMENTS,
                HEADS,
                2 * HALF if TURNED else 0,
                K_DIM,
                REST,
                max(1, TILE // REST),
            )
            a += p
            b += q
            c += r
            bad |= worse
        _store(out, unit, a, b, c, bad, MOMENTS)
    else:
        base = _pointer(bases, layer * 2 + 1, ELEMENT, ALIGNED)
        a, b, c, bad = _plain(
            base,
            dst,
            src,
            block,
            num_slots,
            v_slot_stride,
            v_head_stride,
            ELEMENT,
            MOMENTS,
            HEADS,
            0,
            V_DIM,
            V_COLS,
            max(1, TILE // V_COLS),
        )
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
    half = 0 if rotation is None else rotation.rotary_dim // 2
    rest = keys.shape[2] - 2 * half
    return dict(
        ELEMENT=_ELEMENT[keys.dtype],
        ALIGNED=aligned,
        MOMENTS=moments,
        TURNED=half > 0,
        NEOX=rotation is not None and rotation.is_neox,
        HEADS=keys.shape[1],
        K_DIM=keys.shape[2],
        V_DIM=values.shape[2],
        HALF=half,
        REST=triton.next_power_of_2(rest) if rest else 0,
        V_COLS=triton.next_power_of_2(values.shape[2]),
        HALF_COLS=triton.next_power_of_2(half) if half else 0,
        TILE=TILE,
    )


class TritonDistance:
    """The sums of :class:`~sglang_reasoncache.kernels.distance.DistanceKernel` by Triton.

    A call launches one kernel and waits for nothing; a block that names a slot
    or shift out of range comes out as NaN.

    Args:
        layers: Key and value buffer of every layer, ``[num_slots, heads, head_dim]``
            on one device, elements of a head side by side; all keys laid out
            alike, and all values.
        rotation: The model's rotation, None to compare as cached only.
    """

    def __init__(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rotation: KeyRotation | None,
    ) -> None:
        self._layers = layers
        self._rotation = rotation
        self._device = layers[0][0].device
        addresses = [[buffer.data_ptr() for buffer in layer] for layer in layers]
        self._bases = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        self._aligned = all(address % 16 == 0 for layer in addresses for address in layer)
        if rotation is not None:
            self._cosines = rotation.cos.to(self._device, torch.float32).contiguous()
            self._sines = rotation.sin.to(self._device, torch.float32).contiguous()
        self._constants = {
            (rotated, moments): constants(
                layers[0], rotation if rotated else None, aligned=self._aligned, moments=moments
            )
            for rotated in (False, True)
            for moments in (False, True)
        }

    def squares(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """fp64 ``[pairs, num_layers, 2]`` on the device; arguments checked but for their values."""
        out = self._out(dst_slots, 2)
        self._launch(dst_slots, src_slots, shift, out, moments=False)
        return out

    def moments(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """fp64 ``[pairs, num_layers, 2, 3]`` on the device; arguments checked but for their values."""
        out = self._out(dst_slots, 2, 3)
        self._launch(dst_slots, src_slots, shift, out, moments=True)
        return out

    def _out(self, dst_slots: torch.Tensor, *tail: int) -> torch.Tensor:
        shape = (dst_slots.shape[0], len(self._layers), *tail)
        return torch.empty(shape, dtype=torch.float64, device=self._device)

    def _launch(
        self,
        dst_slots: torch.Tensor,
        src_slots: torch.Tensor,
        shift: torch.Tensor | None,
        out: torch.Tensor,
        *,
        moments: bool,
    ) -> None:
        pairs, block = dst_slots.shape
        if not pairs:
            return
        dst_slots, src_slots = dst_slots.contiguous(), src_slots.contiguous()
        keys, values = self._layers[0]
        rotated = shift is not None and self._rotation is not None
        if rotated:
            assert shift is not None
            tables = (shift.contiguous(), self._cosines, self._sines)
        else:
            # Never read; arguments have to be tensors of the same types.
            tables = (dst_slots, self._bases, self._bases)
        with current_device(self._device):
            distance_kernel[(pairs, len(self._layers), 2)](
                self._bases,
                dst_slots,
                src_slots,
                *tables,
                out,
                self._cosines.shape[0] if rotated else 0,
                block,
                keys.shape[0],
                keys.stride(0),
                keys.stride(1),
                values.stride(0),
                values.stride(1),
                **self._constants[rotated, moments],
                num_warps=NUM_WARPS,
            )
