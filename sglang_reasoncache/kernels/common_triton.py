# SPDX-License-Identifier: Apache-2.0
"""Functions that the Triton kernels share: to read a pool and a plan, rotate keys, and divide work."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from sglang_reasoncache.kernels.rotation import KeyRotation

# Names of element types inside the kernels. fp8 is read as bytes: GPUs before sm_89 cannot convert fp8.
ELEMENT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


#: Kinds of a position in a row of ``req_to_token``. EVICTED: the position has no slot. OWN: the slot's key was
#: cached for this position. SHIFTED: the key was cached for another position. ALIAS: as SHIFTED, and the row
#: has the same slot at that other position too.
EVICTED = tl.constexpr(0)
OWN = tl.constexpr(1)
SHIFTED = tl.constexpr(2)
ALIAS = tl.constexpr(3)


def as_read(buffer: Tensor) -> Tensor:
    """The buffer in the dtype in which kernels read it: uint8 for fp8, else its own dtype."""
    return buffer.view(torch.uint8) if buffer.dtype.itemsize == 1 else buffer


def current_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Makes ``device`` current: Triton launches on the current device, even if the tensors are on another."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def rotary_constants(rotation: KeyRotation | None) -> dict[str, Any]:
    """Compile-time arguments for rotation. If ``rotation`` is None, the kernel does not rotate."""
    if rotation is None:
        return dict(HALF=0, NEOX=False)
    return dict(HALF=rotation.rotary_dim // 2, NEOX=rotation.is_neox)


def rotary_arguments(
    shift: Tensor | None, rotation: KeyRotation | None, ints: Tensor, unused: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Kernel arguments for rotation: shift, cosines, sines, and the number of rows of both tables. ``ints`` and
    ``unused`` stand in for tensors that the kernel does not read, as Triton needs one for every pointer."""
    shift = ints if shift is None else shift.contiguous()
    if rotation is None:
        return shift, unused, unused, 0
    return shift, rotation.cos, rotation.sin, len(rotation.cos)


@triton.jit
def piece_of(count, piece, PIECES: tl.constexpr, TILE: tl.constexpr):
    """Divide ``count`` elements among PIECES programs in multiples of TILE: start and stop of ``piece``."""
    size = tl.cdiv(tl.cdiv(count, PIECES), TILE) * TILE
    start = tl.minimum(piece * size, count)
    return start, tl.minimum(start + size, count)


@triton.jit
def span_of(begin, end, row, total):
    """A query's entries in ``kv_indices``: index of the first, and their number, both kept within ``total``."""
    first = tl.minimum(tl.maximum(tl.load(begin + row), 0), total)
    return first, tl.minimum(tl.maximum(tl.load(end + row), first), total) - first


@triton.jit
def row_of(rows, requests, lengths, request, num_rows, width, row_stride, reach):
    """For the last ``reach`` positions of a request's row: the address of the first, how many there are (0 if
    there is no such row), and the first position. Callers count positions from that first one."""
    row = tl.load(requests + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int64)
    sound = (row >= 0) & (row < num_rows) & (length > 0)
    length = tl.where(sound, tl.minimum(length, width), 0).to(tl.int32)
    first = tl.maximum(length - reach, 0)
    return rows + tl.where(sound, row, 0) * row_stride + first, length - first, first


@triton.jit
def look(rows, cached_at, position, length, first, num_slots):
    """For each ``position``: its slot, the position that the slot's key was cached for, and its kind."""
    slot = tl.load(rows + position, mask=(position >= 0) & (position < length), other=-1)
    kept = (slot >= 0) & (slot < num_slots)
    home = tl.load(cached_at + slot, mask=kept, other=-1) - first
    there = kept & (home >= 0) & (home < length) & (home != position)
    alias = there & (tl.load(rows + home, mask=there, other=-1) == slot)
    kind = tl.where(kept, tl.where(home == position, OWN, SHIFTED), EVICTED)
    return slot, home, tl.where(alias, ALIAS, kind)


@triton.jit
def first_target(kv_indptr, counts, request, piece, PIECES: tl.constexpr):
    """Index at which a program writes its first entry or run: after those of earlier requests and pieces."""
    pieces = tl.arange(0, PIECES)
    earlier = tl.load(counts + request * PIECES + pieces, mask=pieces < piece, other=0)
    return tl.load(kv_indptr + request).to(tl.int64) + tl.sum(earlier, axis=0)


@triton.jit
def targets(kept, to, capacity):
    """Index at which to write each ``kept`` element, which of them fit, and the next tile's first index."""
    flags = kept.to(tl.int32)
    at = to + tl.cumsum(flags, axis=0) - flags
    return at, kept & (at < capacity), to + tl.sum(flags, axis=0)


@triton.jit
def fp8_to_fp16(raw, ELEMENT: tl.constexpr):
    """Convert bytes of either fp8 type to fp16, without rounding."""
    bits = raw.to(tl.uint16)
    if cuda_capability_geq(8, 9):
        kind: tl.constexpr = tl.float8e5 if ELEMENT == "e5m2" else tl.float8e4nv
        return raw.to(kind, bitcast=True).to(tl.float16)
    if ELEMENT == "e5m2":  # the upper byte of an fp16
        return (bits << 8).to(tl.float16, bitcast=True)
    # Read as fp16, the bits of an e4m3 mean 2^-8 of its value. The largest code of e4m3 is NaN.
    half = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
    value = half.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def to_fp32(raw, ELEMENT: tl.constexpr):
    """Elements that were loaded from a pool, as fp32."""
    if ELEMENT == "e4m3" or ELEMENT == "e5m2":
        return fp8_to_fp16(raw, ELEMENT).to(tl.float32)
    return raw.to(tl.float32)


@triton.jit
def load_fp32(pointer, mask, ELEMENT: tl.constexpr):
    """Loads elements of a pool as fp32. They are 0 where ``mask`` is off."""
    return to_fp32(tl.load(pointer, mask=mask, other=0), ELEMENT)


@triton.jit
def load_slots(kv_indices, entry, inside, num_slots):
    """int64 slots of a tile's entries (0 if outside the pool), and which entries have a slot in the pool."""
    slot = tl.load(kv_indices + entry, mask=inside, other=-1)
    ok = (slot >= 0) & (slot < num_slots)
    return tl.where(ok, slot, 0).to(tl.int64), ok


@triton.jit
def pairing(column, HALF: tl.constexpr, NEOX: tl.constexpr):
    """For every column: whether it is rotated, the column it is paired with (itself if it is not rotated),
    whether it is the first of the pair, and the pair's index in a row of the rotary table."""
    rotated = column < 2 * HALF
    if NEOX:
        first = column < HALF
        other = tl.where(first, column + HALF, column - HALF)
        angle = tl.where(first, column, column - HALF)
    else:
        first = column % 2 == 0
        other = column ^ 1
        angle = column // 2
    return rotated, tl.where(rotated, other, column), first, angle


@triton.jit
def load_factors(cosines, sines, shift, rotated, first, angle, mask, HALF: tl.constexpr):
    """Cosine and signed sine. Rotating an element by ``shift`` positions (negative or not) makes it ``element *
    cosine + paired * sine``. Nothing is read where ``mask`` is off or the element is not ``rotated``."""
    at = tl.abs(shift).to(tl.int64) * HALF + angle
    cosine = tl.load(cosines + at, mask=mask & rotated, other=1.0)
    sine = tl.load(sines + at, mask=mask & rotated, other=0.0)
    return cosine, tl.where((shift < 0) ^ first, -sine, sine)


@triton.jit
def rotate_tile(
    k, at, column, mask, by, ok, cosines, sines,
    ELEMENT: tl.constexpr, HALF: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Keys ``k``, fp32, a row of the tile each, rotated by ``by`` positions where ``ok``. ``at``: pointers to
    the rows, whose elements are loaded where ``mask`` is on."""
    shifted = ok & (by != 0)
    if tl.max(shifted.to(tl.int32), axis=0) > 0:
        turned = shifted[:, None]
        rotated, other, first, angle = pairing(column, HALF, NEOX)
        cosine, sine = load_factors(
            cosines, sines, by[:, None], rotated, first, angle, turned, HALF
        )
        there = load_fp32(at + other, mask, ELEMENT)
        # Other elements keep their values: this sum would multiply by the sine 0, and inf * 0 is NaN.
        k = tl.where(turned & rotated, k * cosine + there * sine, k)
    return k
