# SPDX-License-Identifier: Apache-2.0
"""Paged decode attention on a GPU: chunks of a request side by side, then their merge.

Grids depend on the number of queries alone, so a CUDA graph can hold the launches. A program takes
one of at most ``SPLITS`` chunks and all query heads of a KV head. Where a chunk ends depends on the
number of entries alone: a request has the same bits in any batch. A third launch gives weights.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.row_plan import TILE as ENTRIES

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.paged import PagedKv
    from sglang_reasoncache.kernels.rotation import KeyRotation
    from sglang_reasoncache.kernels.row_plan import RowPlan

#: Most chunks of a query's entries.
SPLITS = 32
#: Entries of a chunk are a multiple of this, which every tile divides.
CHUNK = 256
#: Queries of one launch: bounds the memory of unmerged outputs.
QUERIES = 128
NUM_STAGES = 2
#: Of the weights kernel: programs of a query, entries and heads that one reads at once (one after
#: the other, each head would wait for the memory).
PIECES, TILE, HEADS = 64, 128, 16
#: Logits kept at a time, of all queries of a launch. Not a power of 2: contexts are one, and
#: SGLang's rows a few positions longer.
LOGITS_BYTES = 272 << 20

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
# Triton's interpreter multiplies the codes of bf16 instead of their values.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _operand(raw, ELEMENT: tl.constexpr):
    """Elements of a pool as a tensor core multiplies them, without rounding."""
    if ELEMENT == "e4m3" or ELEMENT == "e5m2":
        return common.fp8_to_fp16(raw, ELEMENT)
    else:
        return raw


@triton.jit
def _parts(x, ELEMENT: tl.constexpr):
    """fp32 as the sum of two operands; where they are narrower, 16 of its bits or more."""
    if ELEMENT == "fp32":
        return x, x
    else:
        narrow: tl.constexpr = tl.bfloat16 if ELEMENT == "bf16" else tl.float16
        high = x.to(narrow)
        return high, (x - high.to(tl.float32)).to(narrow)


@triton.jit
def _dot(x, y, sums):
    if _INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums)
    return tl.dot(x, y, sums, input_precision="ieee")


@triton.jit
def _times(high, low, y, sums, ELEMENT: tl.constexpr, EXACT: tl.constexpr):
    """``sums + (high + low) y``; ``low`` is known to be 0 if EXACT."""
    sums = _dot(high, y, sums)
    if ELEMENT != "fp32" and not EXACT:
        sums = _dot(low, y, sums)
    return sums


@triton.jit
def _next(shifts):
    """One that is not 0, if there is any."""
    most = tl.max(shifts, axis=0)
    return tl.where(most != 0, most, tl.min(shifts, axis=0))


@triton.jit
def _turned(
    q_at, q_mask, k, by, cosines, sines, column, rotated, other, earlier, angle, zeros,
    ELEMENT: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Products of the query rotated back ``by`` so many positions with a tile's keys."""
    cosine, sine = common.load_factors(cosines, sines, -by, rotated, earlier, angle, True, HALF)
    # Loaded again: kept, it would take registers from every tile.
    q = tl.load(q_at + column[None, :], mask=q_mask, other=0.0)
    there = tl.load(q_at + other[None, :], mask=q_mask, other=0.0)
    back = q.to(tl.float32) * cosine[None, :] + there.to(tl.float32) * sine[None, :]
    high, low = _parts(back, ELEMENT)
    return _times(high, low, k, zeros, ELEMENT, False)


@triton.jit
def _logits(products, ok, scale, logit_cap, CAPPED: tl.constexpr):
    """Base 2; of keys that are not there -inf."""
    logit = products * scale
    if CAPPED:  # tanh x = 1 - 2 / (exp 2x + 1)
        logit = logit_cap * (1 - 2 / (tl.exp(2 / logit_cap * logit) + 1))
    # Keys that were not read are 0.
    return logit * _LOG2E + tl.where(ok, 0.0, float("-inf"))[None, :]


_SIZES = ["total", "width", "num_slots", "table_rows", "rotations"]


@triton.jit(do_not_specialize=_SIZES)
def chunk_kernel(
    query,  # [rows, heads, K_DIM]
    keys,  # [num_slots, kv_heads, K_DIM]
    values,  # [num_slots, kv_heads, V_DIM]
    begin,  # int32 [rows]
    end,  # int32 [rows]
    kv_indices,  # int32 [total]
    shift,  # int32 [total], unused unless HALF
    cosines,  # fp32 [table_rows, HALF], likewise
    sines, table_rows,
    tile_ptr,  # int32 [total // ENTRIES + rows + 1], unused unless ROTATES
    turns,  # int32 [rotations], likewise: positions
    bits,  # int64 [rotations], likewise
    rotations,
    parts,  # fp32 [rows, heads, SPLITS, V_DIM]: outputs of the chunks
    part_lse,  # fp32 [rows, heads, SPLITS]: base 2
    logits,  # fp32 [rows, heads, width]: base 2, written if LOGITS
    total, width, num_slots, q_row_stride, q_head_stride, k_slot_stride, k_head_stride,
    v_slot_stride, v_head_stride, scale, logit_cap, ELEMENT: tl.constexpr,
    EXACT: tl.constexpr,  # the query is of the operands' type
    CAPPED: tl.constexpr,
    HALF: tl.constexpr,  # 0: nothing is shifted
    NEOX: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # of a program, at least 16
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LOGITS: tl.constexpr,
    ROTATES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * cdiv(GROUP, HEADS), SPLITS, rows)."""
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // blocks
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first, count = common.span_of(begin, end, row, total)
    start, stop = common.piece_of(count, split, SPLITS, CHUNK)
    heads = tl.num_programs(0) // blocks * GROUP
    if start < stop:
        member = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
        head = kv_head * GROUP + member
        k_column = tl.arange(0, K_COLS)
        v_column = tl.arange(0, V_COLS)
        q_at = query + row * q_row_stride + (head * q_head_stride)[:, None]
        q_mask = (member < GROUP)[:, None] & (k_column < K_DIM)[None, :]
        whole = tl.load(q_at + k_column[None, :], mask=q_mask, other=0.0).to(tl.float32)
        q_high, q_low = _parts(whole, ELEMENT)
        keys += kv_head.to(tl.int64) * k_head_stride
        values += kv_head.to(tl.int64) * v_head_stride
        rotated, other, earlier, angle = common.pairing(k_column, HALF, NEOX)
        most = tl.full([HEADS], float("-inf"), tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        sums = tl.zeros([HEADS, V_COLS], tl.float32)
        for at in range(start, stop, TILE):
            entry = at + tl.arange(0, TILE)
            inside = entry < stop
            slot, by, ok = common.load_entries(
                kv_indices, shift, first + entry, inside, num_slots, table_rows, HALF
            )
            k_at = keys + (slot * k_slot_stride)[None, :]
            k_mask = ok[None, :] & (k_column < K_DIM)[:, None]
            k = _operand(tl.load(k_at + k_column[:, None], mask=k_mask, other=0), ELEMENT)
            zeros = tl.zeros([HEADS, TILE], tl.float32)
            logit = _times(q_high, q_low, k, zeros, ELEMENT, EXACT)
            if HALF > 0:
                # Shifts still to be done. No mask of one bit: those cannot change threads.
                left = tl.where(ok, by, 0)
                one = _next(left)
                if one != 0:  # a loop inside a branch leaves the outer one pipelined
                    while one != 0:
                        found = _turned(
                            q_at, q_mask, k, one, cosines, sines, k_column, rotated, other,
                            earlier, angle, zeros, ELEMENT, HALF,
                        )  # fmt: skip
                        logit = tl.where(left[None, :] == one, found, logit)
                        left = tl.where(left == one, 0, left)
                        one = _next(left)
            logit = _logits(logit, ok, scale, logit_cap, CAPPED)
            if LOGITS:
                l_at = logits + ((row * heads + head) * width)[:, None] + entry[None, :]
                l_mask = (member < GROUP)[:, None] & (inside & (entry < width))[None, :]
                tl.store(l_at, logit, mask=l_mask)
            v_at = values + (slot * v_slot_stride)[:, None] + v_column[None, :]
            v_mask = ok[:, None] & (v_column < V_DIM)[None, :]
            v = _operand(tl.load(v_at, mask=v_mask, other=0), ELEMENT)
            now = tl.maximum(most, tl.max(logit, axis=1))
            # Nothing so far: -inf less -inf would be NaN.
            base = tl.where(now == float("-inf"), 0.0, now)
            fading = tl.exp2(most - base)
            p = tl.exp2(logit - base[:, None])
            weight *= fading
            sums *= fading[:, None]
            if ROTATES:
                tile = first // ENTRIES + row + at // ENTRIES
                turn = tl.maximum(tl.load(tile_ptr + tile), 0)
                last = tl.minimum(tl.load(tile_ptr + tile + 1), rotations)
                if turn < last:
                    for one in range(turn, last):
                        by_one = tl.load(turns + one)
                        word = tl.load(bits + one) >> (at % ENTRIES)
                        on = ok & (((word >> tl.arange(0, TILE).to(tl.int64)) & 1) != 0)
                        on &= (by_one > -table_rows) & (by_one < table_rows)
                        if tl.max(on.to(tl.int32), axis=0) > 0:
                            found = _turned(
                                q_at, q_mask, k, by_one, cosines, sines, k_column, rotated, other,
                                earlier, angle, zeros, ELEMENT, HALF,
                            )  # fmt: skip
                            found = _logits(found, on, scale, logit_cap, CAPPED)
                            now = tl.maximum(now, tl.max(found, axis=1))
                            after = tl.where(now == float("-inf"), 0.0, now)
                            fading = tl.exp2(base - after)
                            p = p * fading[:, None] + tl.exp2(found - after[:, None])
                            weight *= fading
                            sums *= fading[:, None]
                            base = after
            weight += tl.sum(p, axis=1)
            high, low = _parts(p, ELEMENT)
            sums = _times(high, low, v, sums, ELEMENT, False)
            most = now
        unit = (row * heads + head) * SPLITS + split
        nothing = weight == 0
        result = sums / tl.where(nothing, 1.0, weight)[:, None]
        lse = tl.where(nothing, float("-inf"), most + tl.log2(weight))
        tl.store(part_lse + unit, lse, mask=member < GROUP)
        o_mask = (member < GROUP)[:, None] & (v_column < V_DIM)[None, :]
        tl.store(parts + (unit * V_DIM)[:, None] + v_column[None, :], result, mask=o_mask)


@triton.jit(do_not_specialize=["total"])
def merge_kernel(
    parts,  # as the chunk kernel left them
    part_lse, begin, end,
    sinks,  # fp32 [heads], unused unless SINKS
    out,  # [rows, heads, V_DIM]
    lse,  # fp32 [rows, heads], unused unless LSE
    total, out_row_stride, out_head_stride, SINKS: tl.constexpr, LSE: tl.constexpr,
    V_DIM: tl.constexpr, V_COLS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows)."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    unit = row * tl.num_programs(0) + head
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, V_COLS)
    _first, count = common.span_of(begin, end, row, total)
    start, stop = common.piece_of(count, split, SPLITS, CHUNK)
    used = start < stop
    found = tl.load(part_lse + unit * SPLITS + split, mask=used, other=float("-inf"))
    at = (unit * SPLITS + split)[:, None] * V_DIM + column[None, :]
    mask = used[:, None] & (column < V_DIM)[None, :]
    part = tl.load(parts + at, mask=mask, other=0.0)
    most = tl.max(found, axis=0)
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks + head) * _LOG2E
        most = tl.maximum(most, sink)
    base = tl.where(most == float("-inf"), 0.0, most)
    weight = tl.exp2(found - base)
    whole = tl.sum(weight, axis=0) + tl.exp2(sink - base)
    nothing = whole == 0
    result = tl.sum(part * weight[:, None], axis=0) / tl.where(nothing, 1.0, whole)
    o_at = out + row * out_row_stride + head * out_head_stride + column
    tl.store(o_at, result.to(out.dtype.element_ty), mask=column < V_DIM)
    if LSE:
        both = tl.where(nothing, float("-inf"), (base + tl.log2(whole)) * _LN2)
        tl.store(lse + unit, both)


@triton.jit(do_not_specialize=["total", "width", "size"])
def weights_kernel(
    logits,  # fp32 [rows, heads, width]: base 2
    lse,  # fp32 [rows, heads]: natural
    begin,  # int32 [rows]
    end,  # int32 [rows]
    first,  # int32 or int64 [rows]: of each query's entries in ``weights``
    weights,  # fp32 [size], added to
    total, width, size, heads: tl.constexpr, HEADS: tl.constexpr, PIECES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (PIECES, rows). Adds each entry's softmax weight, summed over the heads, to ``weights``.

    An entry's weight is written by one program: always the same bits.
    """
    row = tl.program_id(1).to(tl.int64)
    _first, count = common.span_of(begin, end, row, total)
    count = tl.minimum(count, width)
    to = tl.load(first + row).to(tl.int64)
    start, stop = common.piece_of(count, tl.program_id(0), PIECES, TILE)
    for at in range(start, stop, TILE):
        entry = at + tl.arange(0, TILE)
        inside = entry < count
        found = tl.zeros([TILE], tl.float32)
        for some in range(0, heads, HEADS):
            head = some + tl.arange(0, HEADS)
            real = head < heads
            unit = row * heads + head
            whole = tl.load(lse + unit, mask=real, other=0.0) * _LOG2E
            # Entries that count for nothing, all of them: -inf less -inf would be NaN.
            whole = tl.where(whole == float("-inf"), 0.0, whole)
            mask = real[:, None] & inside[None, :]
            at_logit = logits + (unit * width)[:, None] + entry[None, :]
            logit = tl.load(at_logit, mask=mask, other=float("-inf"))
            found += tl.sum(tl.exp2(logit - whole[:, None]), axis=0)
        there = inside & (to + entry >= 0) & (to + entry < size)
        place = weights + to + entry
        tl.store(place, tl.load(place, mask=there, other=0.0) + found, mask=there)


def rows_of_a_launch(heads: int, width: int) -> int:
    """Queries whose logits are kept at a time."""
    rows = max(1, LOGITS_BYTES // max(4 * heads * width, 1))
    # Each launch begins at a multiple of 16 bytes: for other addresses Triton would compile each
    # kernel again, in the middle of a forward.
    return rows if rows < 4 else rows // 4 * 4


def columns(dim: int) -> int:
    """Columns of a tile that holds heads of ``dim`` elements; tensor cores want 16."""
    return max(16, triton.next_power_of_2(dim))


def warps(k_dim: int) -> int:
    """Of a program: queries lie in the registers of each warp as a whole."""
    return 4 if k_dim <= 128 else 8


def constants(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotation: KeyRotation | None,
    *,
    capped: bool = False,
    logits: bool = False,
    rotates: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments of :func:`chunk_kernel`; ``rotation`` only if entries are shifted."""
    group = query.shape[1] // keys.shape[1]
    k_cols, v_cols = columns(keys.shape[2]), columns(values.shape[2])
    return dict(
        ELEMENT=common.ELEMENT[keys.dtype],
        # fp8 is multiplied as fp16.
        EXACT=query.dtype == (torch.float16 if keys.element_size() == 1 else keys.dtype),
        CAPPED=capped,
        **common.rotary_constants(rotation),
        K_DIM=keys.shape[2],
        V_DIM=values.shape[2],
        K_COLS=k_cols,
        V_COLS=v_cols,
        GROUP=group,
        HEADS=min(64, columns(group)),
        SPLITS=SPLITS,
        CHUNK=CHUNK,
        # Up to 16 KiB of K and as much of V.
        TILE=max(16, min(64, 2**14 // (max(k_cols, v_cols) * keys.element_size()))),
        LOGITS=logits,
        ROTATES=rotates and rotation is not None,
        ENTRIES=ENTRIES,
    )


def decode(
    kv: PagedKv,
    query: torch.Tensor,
    out: torch.Tensor,
    plan: RowPlan,
    spans: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None,
    scale: float,
    logit_cap: float,
    weights: torch.Tensor | None,
    first: torch.Tensor | None,
    longest: int | None,
) -> None:
    """See :func:`sglang_reasoncache.kernels.decode.decode_attention`; waits for nothing.

    Takes memory of ``min(batch, QUERIES) * heads * SPLITS`` fp32 outputs; with ``weights`` also of
    logits, at most ``LOGITS_BYTES`` unless one query has more. ``first``: int
    ``[batch]``, where each query's weights begin; None adds up the spans, in launches of its own.
    """
    batch, heads, _ = query.shape
    if not batch:
        return
    keys, values, total = kv.keys, kv.values, len(plan.kv_indices)
    (begin, end), observed = spans, weights is not None
    rotates = plan.rotations is not None
    if rotates and plan.shift is None:
        plan = plan._replace(shift=torch.zeros_like(plan.kv_indices))
    rotation = None if plan.shift is None else kv.rotation
    options = dict(capped=logit_cap > 0, logits=observed, rotates=rotates)
    fixed = constants(query, keys, values, rotation, **options)
    rows, width, lse = min(batch, QUERIES), 0, None
    made = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    if observed:
        width = total if longest is None else min(longest, total)
        rows = min(rows, rows_of_a_launch(heads, width))
        lse = made((batch, heads))
        if first is None:
            counts = (end.clamp(max=total) - begin.clamp(min=0)).clamp_(min=0)
            first = counts.cumsum(0, dtype=torch.int64) - counts
    parts, part_lse = made((rows, heads, SPLITS, values.shape[2])), made((rows, heads, SPLITS))
    logits = made((rows, heads, width)) if observed else part_lse
    blocks = keys.shape[1] * triton.cdiv(fixed["GROUP"], fixed["HEADS"])
    pool = common.as_read(keys), common.as_read(values)
    rotary = common.rotary_arguments(plan.shift, rotation, plan.kv_indices, part_lse)
    strides = *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2]
    sizes = total, width, len(keys)
    merged = {name: fixed[name] for name in ("V_DIM", "V_COLS", "SPLITS", "CHUNK")}
    merged |= dict(SINKS=sinks is not None, LSE=observed)
    weighed = dict(heads=heads, HEADS=min(HEADS, triton.next_power_of_2(heads)))
    weighed |= dict(PIECES=PIECES, TILE=TILE)
    fixed |= dict(num_warps=warps(keys.shape[2]), num_stages=NUM_STAGES)
    with common.current_device(query.device):
        for some in range(0, batch, rows):
            here = slice(some, some + rows)
            begin, end = (side[here] for side in spans)
            count = len(begin)
            entries = begin, end, plan.kv_indices, *rotary
            found = parts, part_lse, logits
            turns: tuple[Any, ...] = begin, begin, begin, 0
            if plan.rotations is not None:
                tile_ptr, by, bits = plan.rotations
                turns = tile_ptr[some:], by, bits, len(by)
            chunk_kernel[(blocks, SPLITS, count)](
                query[here],
                *pool,
                *entries,
                *turns,
                *found,
                *sizes,
                *strides,
                scale,
                logit_cap,
                **fixed,
            )
            lse_here = part_lse if lse is None else lse[here]
            merge_kernel[(heads, count)](
                *(parts, part_lse, begin, end, part_lse if sinks is None else sinks),
                *(out[here], lse_here, total, *out.stride()[:2]),
                **merged,
            )
            if weights is not None and lse is not None and first is not None:
                weights_kernel[(PIECES, count)](
                    *(logits, lse_here, begin, end, first[here], weights),
                    *(total, width, len(weights)),
                    **weighed,
                )
