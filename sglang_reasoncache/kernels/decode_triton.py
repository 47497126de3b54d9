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
from triton.language.target_info import cuda_capability_geq

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
#: Lines of a program's products: a tensor core multiplies 16; more than 32, or 16 of more than 128
#: columns, do not fit the registers.
LINES = 16, 32
#: So that the next tile's K and V are copied while one is read: slots, then K and V, are on their way.
NUM_STAGES = 5
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
def _dot(x, y, sums):
    if _INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), sums)
    return tl.dot(x, y, sums, input_precision="ieee")


@triton.jit
def _times(x, y, sums, ELEMENT: tl.constexpr, EXACT: tl.constexpr):
    """``sums + x y`` for fp32 ``x``. Where operands are narrower, ``x`` is the sum of two of them, which
    keeps 16 of its bits or more; EXACT: of one."""
    y = _operand(y, ELEMENT)
    if ELEMENT == "fp32":
        sums = _dot(x, y, sums)
    elif EXACT:
        sums = _dot(x.to(y.dtype), y, sums)
    else:
        if ELEMENT == "bf16":  # its bits are the upper half of fp32's
            high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        else:
            high = x.to(y.dtype).to(tl.float32)
        sums = _dot(high.to(y.dtype), y, sums)
        sums = _dot((x - high).to(y.dtype), y, sums)
    return sums


@triton.jit
def _next(shifts):
    """One of ``shifts`` that is not 0; 0 if all are."""
    most = tl.max(shifts, axis=0)
    return tl.where(most != 0, most, tl.min(shifts, axis=0))


@triton.jit
def _turned(
    q_at, q_mask, k, by, cosines, sines, column, zeros, ELEMENT: tl.constexpr,
    HALF: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Products of a tile's keys with queries rotated back ``by`` so many positions: one number, or
    ``[HEADS, 1]``."""
    rotated, other, earlier, angle = common.pairing(column[None, :], HALF, NEOX)
    cosine, sine = common.load_factors(cosines, sines, -by, rotated, earlier, angle, True, HALF)
    # Loaded again: kept, it would take registers from every tile.
    q = tl.load(q_at + column[None, :], mask=q_mask, other=0.0)
    there = tl.load(q_at + other, mask=q_mask, other=0.0)
    back = q.to(tl.float32) * cosine + there.to(tl.float32) * sine
    return _times(back, k, zeros, ELEMENT, False)


@triton.jit
def _rotations(by, bits, which, last, bit, ok, table_rows):
    """Of some of a tile's rotations: by how many positions, and ``[which, entries]``, whether an entry
    is used so. Those from ``last`` on, and beyond the rotary table, use nothing."""
    back = tl.load(by + which, mask=which < last, other=0)
    sound = (back > -table_rows) & (back < table_rows)
    word = tl.load(bits + which, mask=(which < last) & sound, other=0)
    seen = ((word[:, None] >> bit[None, :].to(tl.int64)) & 1) != 0
    return tl.where(sound, back, 0), seen & ok[None, :]


@triton.jit
def _logits(products, seen, scale, logit_cap, CAPPED: tl.constexpr):
    """Base 2; -inf where a key is not ``seen``, or its product is -inf."""
    if CAPPED:  # tanh x = 1 - 2 / (exp 2x + 1)
        seen &= products != float("-inf")
        products = logit_cap * (1 - 2 / (tl.exp(2 / logit_cap * scale * products) + 1))
        scale = 1.0
    return tl.where(seen, products * (scale * _LOG2E), float("-inf"))


@triton.jit
def _finite(most):
    """The largest logit so far, to subtract from logits; 0 if there is none, as -inf - -inf is NaN."""
    return tl.where(most == float("-inf"), 0.0, most)


_SIZES = ["total", "width", "num_slots", "table_rows", "rotations"]


@triton.jit(do_not_specialize=_SIZES)
def chunk_kernel(
    query,  # [rows, heads, K_DIM]
    keys,  # [num_slots, kv_heads, K_DIM]
    values,  # [num_slots, kv_heads, V_DIM]
    begin,  # int32 [rows]
    end,  # int32 [rows]
    kv_indices,  # int32 [total]
    shift,  # int32 [total], unused unless HALF and not ROTATES
    cosines,  # fp32 [table_rows, HALF], unused unless HALF
    sines, table_rows,
    tile_ptr,  # int32 [total // ENTRIES + rows + 1], unused unless ROTATES
    by,  # int32 [rotations]: positions, unused unless ROTATES
    bits,  # int64 [rotations], unused unless ROTATES
    rotations,
    parts,  # fp32 [rows, heads, SPLITS, V_DIM]: outputs of the chunks
    part_lse,  # fp32 [rows, heads, SPLITS]: base 2
    logits,  # fp32 [rows, heads, width]: base 2, written if LOGITS
    total, width, num_slots, q_row_stride, q_head_stride, k_slot_stride, k_head_stride,
    v_slot_stride, v_head_stride, scale, logit_cap, ELEMENT: tl.constexpr,
    EXACT: tl.constexpr,  # the query is of the operands' type
    CAPPED: tl.constexpr,
    HALF: tl.constexpr,  # 0: nothing is rotated
    NEOX: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEADS: tl.constexpr,  # lines of a program's products, at least 16
    USES: tl.constexpr,  # rotations that share a product; unless ROTATES 1
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LOGITS: tl.constexpr,
    ROTATES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * cdiv(GROUP, HEADS), SPLITS, rows).

    A tensor core multiplies 16 lines at least. Where a KV head has fewer query heads, the others hold
    the same query turned by further rotations of the tile. Each line has its own maximum, weight and
    sum; lines of one head are merged at the end, as chunks are.
    """
    MEMBERS: tl.constexpr = HEADS // USES
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // blocks
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    first, count = common.span_of(begin, end, row, total)
    start, stop = common.piece_of(count, split, SPLITS, CHUNK)
    heads = tl.num_programs(0) // blocks * GROUP
    if start < stop:
        line = tl.arange(0, HEADS)
        member = tl.program_id(0) % blocks * HEADS + line % MEMBERS
        use = line // MEMBERS
        # Lines without a head of their own hold another's again.
        head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
        k_column = tl.arange(0, K_COLS)
        v_column = tl.arange(0, V_COLS)
        q_at = query + row * q_row_stride + (head * q_head_stride)[:, None]
        q_mask = (k_column < K_DIM)[None, :]
        own = tl.load(q_at + k_column[None, :], mask=q_mask, other=0.0).to(tl.float32)
        keys += kv_head.to(tl.int64) * k_head_stride
        values += kv_head.to(tl.int64) * v_head_stride
        most = tl.full([HEADS], float("-inf"), tl.float32)
        weight = tl.zeros([HEADS], tl.float32)
        sums = tl.zeros([HEADS, V_COLS], tl.float32)
        for at in tl.range(start, stop, TILE, disable_licm=True):
            offset = tl.arange(0, TILE)
            entry = at + offset
            slot, ok = common.load_slots(kv_indices, first + entry, entry < stop, num_slots)
            # Keys as rows, like values: addresses of both are computed for the same threads.
            k_at = keys + (slot * k_slot_stride)[:, None] + k_column[None, :]
            k_mask = ok[:, None] & (k_column < K_DIM)[None, :]
            k = tl.load(k_at, mask=k_mask, other=0).T
            zeros = tl.zeros([HEADS, TILE], tl.float32)
            turn, last = 0, 0
            if ROTATES:
                tile = first // ENTRIES + row + at // ENTRIES
                turn = tl.maximum(tl.load(tile_ptr + tile), 0)
                last = tl.minimum(tl.load(tile_ptr + tile + 1), rotations)
            if turn < last:
                p, now = zeros, most
                # Not pipelined: its buffers would take memory from the outer loop.
                for one in tl.range(turn, last, USES, num_stages=1):
                    back, seen = _rotations(
                        by, bits, one + use, last, at % ENTRIES + offset, ok, table_rows
                    )
                    found = _turned(
                        q_at, q_mask, k, back[:, None], cosines, sines, k_column, zeros,
                        ELEMENT, HALF, NEOX,
                    )  # fmt: skip
                    found = _logits(found, seen, scale, logit_cap, CAPPED)
                    after = tl.maximum(now, tl.max(found, axis=1))
                    base = _finite(after)
                    p = p * tl.exp2(now - base)[:, None] + tl.exp2(found - base[:, None])
                    now = after
            else:
                found = _times(own, k, zeros, ELEMENT, EXACT)
                if HALF > 0 and not ROTATES:
                    s_at = shift + first + entry
                    some = tl.load(s_at, mask=ok, other=0) != 0
                    if tl.max(some.to(tl.int32), axis=0) != 0:
                        # Shifts still to be done: loaded again, in the threads that need them, and
                        # no mask of one bit, which cannot change threads.
                        left = tl.load(s_at, mask=ok, other=0)
                        sound = (left > -table_rows) & (left < table_rows)
                        found = tl.where(sound[None, :], found, float("-inf"))
                        left = tl.where(sound, left, 0)
                        one = _next(left)
                        while one != 0:
                            turned = _turned(
                                q_at, q_mask, k, one, cosines, sines, k_column, zeros,
                                ELEMENT, HALF, NEOX,
                            )  # fmt: skip
                            found = tl.where(left[None, :] == one, turned, found)
                            left = tl.where(left == one, 0, left)
                            one = _next(left)
                found = _logits(found, ok[None, :], scale, logit_cap, CAPPED)
                if USES > 1:
                    found = tl.where(use[:, None] == 0, found, float("-inf"))
                now = tl.maximum(most, tl.max(found, axis=1))
                p = tl.exp2(found - _finite(now)[:, None])
                if LOGITS:
                    l_at = logits + ((row * heads + head) * width)[:, None] + entry[None, :]
                    l_mask = (member < GROUP)[:, None]
                    l_mask &= ((entry < stop) & (entry < width))[None, :]
                    tl.store(l_at, found, mask=l_mask)
            v_at = values + (slot * v_slot_stride)[:, None] + v_column[None, :]
            v_mask = ok[:, None] & (v_column < V_DIM)[None, :]
            v = tl.load(v_at, mask=v_mask, other=0)
            fading = tl.exp2(most - _finite(now))
            weight = weight * fading + tl.sum(p, axis=1)
            sums = _times(p, v, sums * fading[:, None], ELEMENT, False)
            most = now
        if USES > 1:
            lines = tl.reshape(most, [USES, MEMBERS])
            most = tl.max(lines, axis=0)
            fading = tl.exp2(lines - _finite(most)[None, :])
            weight = tl.sum(tl.reshape(weight, [USES, MEMBERS]) * fading, axis=0)
            sums = tl.reshape(sums, [USES, MEMBERS, V_COLS])
            sums = tl.sum(sums * fading[:, :, None], axis=0)
            member = tl.arange(0, MEMBERS)
        real = member < GROUP
        unit = (row * heads + kv_head * GROUP + member) * SPLITS + split
        nothing = weight == 0
        result = sums / tl.where(nothing, 1.0, weight)[:, None]
        lse = tl.where(nothing, float("-inf"), most + tl.log2(weight))
        tl.store(part_lse + unit, lse, mask=real)
        o_mask = real[:, None] & (v_column < V_DIM)[None, :]
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
    for at in tl.range(start, stop, TILE, disable_licm=True):
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


def compiler_options(constants: dict[str, Any]) -> dict[str, int]:
    """Compiler's options of :func:`chunk_kernel`: enough warps to hold what a program keeps."""
    element, lines = constants["ELEMENT"], constants["HEADS"]
    by_hand = element in ("e4m3", "e5m2") and not cuda_capability_geq(8, 9)
    wide = constants["K_COLS"] > 128 or lines > LINES[0] or element == "fp32" or by_hand
    return dict(num_warps=8 if wide else 4, num_stages=NUM_STAGES)


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
    rotates = rotates and rotation is not None
    k_cols, v_cols = columns(keys.shape[2]), columns(values.shape[2])
    most = LINES[max(k_cols, v_cols) <= 128]
    heads = min(max(LINES[0], triton.next_power_of_2(group)), most)
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
        HEADS=heads,
        USES=heads // min(heads, triton.next_power_of_2(group)) if rotates else 1,
        SPLITS=SPLITS,
        CHUNK=CHUNK,
        # Up to 16 KiB of K and as much of V.
        TILE=max(16, min(64, 2**14 // (max(k_cols, v_cols) * max(2, keys.element_size())))),
        LOGITS=logits,
        ROTATES=rotates,
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
    ``[batch]``, where each query's weights begin; None: the spans are added up, in separate launches.
    """
    batch, heads, _ = query.shape
    if not batch:
        return
    keys, values, total = kv.keys, kv.values, len(plan.kv_indices)
    (begin, end), observed = spans, weights is not None
    rotates = plan.rotations is not None
    rotation = kv.rotation if rotates or plan.shift is not None else None
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
    fixed |= compiler_options(fixed)
    with common.current_device(query.device):
        for some in range(0, batch, rows):
            here = slice(some, some + rows)
            begin, end = (side[here] for side in spans)
            count = len(begin)
            entries = begin, end, plan.kv_indices, *rotary
            found = parts, part_lse, logits
            rotations: tuple[Any, ...] = begin, begin, begin, 0
            if plan.rotations is not None:
                tile_ptr, by, bits = plan.rotations
                rotations = tile_ptr[some:], by, bits, len(by)
            chunk_kernel[(blocks, SPLITS, count)](
                query[here],
                *pool,
                *entries,
                *rotations,
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
