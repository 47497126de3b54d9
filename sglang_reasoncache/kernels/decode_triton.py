# SPDX-License-Identifier: Apache-2.0
"""Paged decode attention on a GPU. One kernel computes a request's chunks in parallel, another merges them.

For a given model, launch grids depend only on the number of queries, so a CUDA graph can hold the launches. A
program takes one of at most ``SPLITS`` chunks and up to 32 query heads of a KV head. Where the chunks end
depends only on how many entries (slots) the request reads, so its output has the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels import tile_triton as tiles
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import TILE as ENTRIES
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.rotation import KeyRotation

#: Limits on the memory for the outputs of chunks: the most chunks of a query, the most queries of a launch, and
#: the most elements that the merged outputs of a launch have.
SPLITS, QUERIES, ELEMENTS = 32, 128, 2**21
#: Chunks begin at multiples of this number of entries, which is a multiple of every tile's size.
CHUNK = 256
#: Number of pipeline stages: enough to load the next tile's slots, K and V while a tile is multiplied.
NUM_STAGES = 5


@triton.jit(do_not_specialize=["total", "num_slots", "table_rows", "rotations"])
def chunk_kernel(
    query,  # [rows, heads, K_DIM]; if LATENT, [rows, heads, V_DIM + K_DIM]
    keys,  # [num_slots, kv_heads, K_DIM]
    values,  # [num_slots, kv_heads, V_DIM]
    begin,  # int32 [rows]
    end,  # int32 [rows]
    kv_indices,  # int32 [total]
    shift,  # int32 [total], read only if HALF and not ROTATES
    cosines,  # fp32 [table_rows, HALF], unused unless HALF
    sines, table_rows,
    tile_ptr,  # int32 [total // ENTRIES + rows + 1], unused unless ROTATES, see ``plan.Rotations``
    by,  # int32 [rotations]: by how many positions, unused unless ROTATES
    bits,  # int64 [rotations], unused unless ROTATES
    rotations,
    parts,  # fp32 [rows, heads, SPLITS, V_DIM]: outputs of the chunks
    part_lse,  # fp32 [rows, heads, SPLITS]: log-sum-exp of the chunks' logits, base 2
    total, num_slots, q_row_stride, q_head_stride, k_slot_stride, k_head_stride,
    v_slot_stride, v_head_stride, scale, logit_cap, ELEMENT: tl.constexpr,
    EXACT: tl.constexpr,  # the query has the type in which products are computed
    CAPPED: tl.constexpr,
    HALF: tl.constexpr,  # 0: nothing is rotated
    NEOX: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    GROUP: tl.constexpr,  # number of query heads per KV head
    HEADS: tl.constexpr,  # lines (rows) of a program's matrix products, at least 16
    USES: tl.constexpr,  # number of rotations in a product; 1 unless ROTATES
    SPLITS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ROTATES: tl.constexpr,
    ENTRIES: tl.constexpr,
    LATENT: tl.constexpr,  # MLA: the first V_DIM dims of a query are multiplied with ``values``
):  # fmt: skip
    """Grid (kv_heads * cdiv(GROUP, HEADS), SPLITS, rows).

    A tensor core computes at least 16 lines (rows of a product) at once. If a KV head has at most 8 query heads
    and the plan has rotations (ROTATES), the lines hold each head USES times, under different rotations. Each
    line has its own maximum, weight and sums. At the end, the lines of a query head are merged, as chunks are.
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
        # Lines beyond the last query head compute that head once more. Their results are not stored.
        head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
        k_column = tl.arange(0, K_COLS)
        v_column = tl.arange(0, V_COLS)
        q_at = query + row * q_row_stride + (head * q_head_stride)[:, None]
        if LATENT:
            latent_at = q_at + v_column[None, :]
            latent_mask = (v_column < V_DIM)[None, :]
            latent = tl.load(latent_at, mask=latent_mask, other=0.0)
            q_at += V_DIM
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
            # Keys are loaded as rows, like values, so that the same threads compute the addresses of K and V.
            k_at = keys + (slot * k_slot_stride)[:, None] + k_column[None, :]
            k_mask = ok[:, None] & (k_column < K_DIM)[None, :]
            k = tl.load(k_at, mask=k_mask, other=0).T
            v_at = values + (slot * v_slot_stride)[:, None] + v_column[None, :]
            v_mask = ok[:, None] & (v_column < V_DIM)[None, :]
            unrotated = tl.zeros([HEADS, TILE], tl.float32)
            if LATENT:
                v = tl.load(v_at, mask=v_mask, other=0)
                if not EXACT:  # loaded again: two products in ``times`` leave no registers for it
                    latent = tl.load(latent_at, mask=latent_mask, other=0.0)
                unrotated = tiles.times(latent.to(tl.float32), v.T, unrotated, ELEMENT, EXACT)
            turn, last = 0, 0
            if ROTATES:
                tile = first // ENTRIES + row + at // ENTRIES
                turn = tl.maximum(tl.load(tile_ptr + tile), 0)
                last = tl.minimum(tl.load(tile_ptr + tile + 1), rotations)
            if turn < last:
                p, now = tl.zeros([HEADS, TILE], tl.float32), most
                # Not pipelined, because a pipeline of this loop would take memory from that of the outer loop.
                for one in tl.range(turn, last, USES, num_stages=1):
                    back, seen = tiles.rotations(
                        by, bits, one + use, last, at % ENTRIES + offset, ok, table_rows
                    )
                    found = tiles.turned(
                        q_at, q_mask, k, back[:, None], cosines, sines, k_column, unrotated,
                        ELEMENT, HALF, NEOX,
                    )  # fmt: skip
                    found = tiles.logits(found, seen, scale, logit_cap, CAPPED)
                    after = tl.maximum(now, tl.max(found, axis=1))
                    base = tiles.finite(after)
                    p = p * tl.exp2(now - base)[:, None] + tl.exp2(found - base[:, None])
                    now = after
            else:
                found = tiles.times(own, k, unrotated, ELEMENT, EXACT)
                if HALF > 0 and not ROTATES:
                    s_at = shift + first + entry
                    some = tl.load(s_at, mask=ok, other=0) != 0
                    if tl.max(some.to(tl.int32), axis=0) != 0:
                        # ``left``: each entry's shift until it is applied, then 0. The shifts are loaded again
                        # in the threads that need them, because a 1-bit mask like ``some`` cannot move there.
                        left = tl.load(s_at, mask=ok, other=0)
                        sound = (left > -table_rows) & (left < table_rows)
                        found = tl.where(sound[None, :], found, float("-inf"))
                        left = tl.where(sound, left, 0)
                        one = tiles.next_shift(left)
                        while one != 0:
                            turned = tiles.turned(
                                q_at, q_mask, k, one, cosines, sines, k_column, unrotated,
                                ELEMENT, HALF, NEOX,
                            )  # fmt: skip
                            found = tl.where(left[None, :] == one, turned, found)
                            left = tl.where(left == one, 0, left)
                            one = tiles.next_shift(left)
                found = tiles.logits(found, ok[None, :], scale, logit_cap, CAPPED)
                if USES > 1:
                    found = tl.where(use[:, None] == 0, found, float("-inf"))
                now = tl.maximum(most, tl.max(found, axis=1))
                p = tl.exp2(found - tiles.finite(now)[:, None])
            if not LATENT:
                v = tl.load(v_at, mask=v_mask, other=0)
            fading = tl.exp2(most - tiles.finite(now))
            weight = weight * fading + tl.sum(p, axis=1)
            sums = tiles.times(p, v, sums * fading[:, None], ELEMENT, False)
            most = now
        if USES > 1:
            lines = tl.reshape(most, [USES, MEMBERS])
            most = tl.max(lines, axis=0)
            fading = tl.exp2(lines - tiles.finite(most)[None, :])
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
    parts,  # written by the chunk kernel
    part_lse, begin, end,
    sinks,  # fp32 [heads], unused unless SINKS
    out,  # [rows, heads, V_DIM]
    total, out_row_stride, out_head_stride, SINKS: tl.constexpr,
    V_DIM: tl.constexpr, V_COLS: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). Merges the chunks of a query head."""
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
        sink = tl.load(sinks + head) * tiles.LOG2E
        most = tl.maximum(most, sink)
    base = tiles.finite(most)
    weight = tl.exp2(found - base)
    whole = tl.sum(weight, axis=0) + tl.exp2(sink - base)
    result = tl.sum(part * weight[:, None], axis=0) / tl.where(whole == 0, 1.0, whole)
    o_at = out + row * out_row_stride + head * out_head_stride + column
    tl.store(o_at, result.to(out.dtype.element_ty), mask=column < V_DIM)


def compiler_options(constants: dict[str, Any]) -> dict[str, int]:
    """Triton's options for :func:`chunk_kernel`: enough warps to hold a program's data in registers."""
    element, lines = constants["ELEMENT"], constants["HEADS"]
    by_hand = element in ("e4m3", "e5m2") and not cuda_capability_geq(8, 9)
    columns = max(constants["K_COLS"], constants["V_COLS"])
    wide = columns > 128 or lines > tiles.LINES[0] or element == "fp32" or by_hand
    # Fewer stages are used for latent rows, because these are wide.
    stages = 2 if constants["LATENT"] else NUM_STAGES
    return dict(num_warps=8 if wide else 4, num_stages=stages)


def constants(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotation: KeyRotation | None,
    *,
    capped: bool = False,
    rotates: bool = False,
    latent: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments of :func:`chunk_kernel`. ``rotation``: None if no entry is shifted."""
    group = query.shape[1] // keys.shape[1]
    k_cols, v_cols = (tiles.columns(side.shape[2]) for side in (keys, values))
    lines = tiles.lines(group, max(k_cols, v_cols))
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
        HEADS=lines,
        USES=lines // min(lines, triton.next_power_of_2(group)) if rotates else 1,
        SPLITS=SPLITS,
        CHUNK=CHUNK,
        TILE=tiles.tile(max(k_cols, v_cols), keys.element_size()),
        ROTATES=rotates,
        ENTRIES=ENTRIES,
        LATENT=latent,
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
) -> None:
    """See :func:`sglang_reasoncache.kernels.decode.decode_attention`. Waits for nothing. The chunks' outputs
    take ``min(batch, QUERIES) * heads * v_dim * SPLITS`` fp32 numbers, but at most ``ELEMENTS * SPLITS``."""
    batch, heads, _ = query.shape
    if not batch:
        return
    keys, values, total = kv.keys, kv.values, len(plan.kv_indices)
    rotates = plan.rotations is not None
    rotation = kv.rotation if rotates or plan.shift is not None else None
    asked = dict(capped=logit_cap > 0, rotates=rotates, latent=kv.latent)
    fixed = constants(query, keys, values, rotation, **asked)
    merged = {name: fixed[name] for name in ("V_DIM", "V_COLS", "SPLITS", "CHUNK")}
    options = compiler_options(fixed)
    rows = min(batch, QUERIES, max(1, ELEMENTS // (heads * values.shape[2])))
    part_lse = query.new_empty((rows, heads, SPLITS), dtype=torch.float32)
    parts = part_lse.new_empty((rows, heads, SPLITS, values.shape[2]))
    blocks = keys.shape[1] * triton.cdiv(fixed["GROUP"], fixed["HEADS"])
    pool = common.as_read(keys), common.as_read(values)
    rotary = common.rotary_arguments(plan.shift, rotation, plan.kv_indices, part_lse)
    strides = *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2]
    with common.current_device(query.device):
        for some in range(0, batch, rows):
            here = slice(some, some + rows)
            begin, end = (side[here] for side in spans)
            rotations: tuple[Any, ...] = begin, begin, begin, 0
            if plan.rotations is not None:
                tile_ptr, by, bits = plan.rotations
                rotations = tile_ptr[some:], by, bits, len(by)
            chunk_kernel[(blocks, SPLITS, len(begin))](
                *(query[here], *pool, begin, end, plan.kv_indices, *rotary, *rotations),
                *(parts, part_lse, total, len(keys), *strides, scale, logit_cap),
                **(fixed | options),
            )
            merge_kernel[(heads, len(begin))](
                *(parts, part_lse, begin, end, part_lse if sinks is None else sinks),
                *(out[here], total, *out.stride()[:2]),
                SINKS=sinks is not None,
                **merged,
            )
