# SPDX-License-Identifier: Apache-2.0
"""Paged decode attention on a GPU. One kernel computes a request's chunks in parallel, another merges them.

For a given model, launch grids depend only on the number of queries, so a CUDA graph can hold the launches. A
program takes one of at most ``SPLITS`` chunks and up to 32 query heads of a KV head (64 of a latent), of all
queries of a row. Where the chunks end depends only on how many entries (slots) the request reads, so its output
has the same bits in any batch.
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
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.kernels.row_plan import TILE as ENTRIES
from sglang_reasoncache.kernels.row_plan import Rotations, RowPlan

# Limits on the memory for the outputs of chunks.
#: The most chunks of a query.
SPLITS = 32
#: Launches of a multiple of this many requests each begin at addresses that are aligned as those of the first.
_ALIGNED = 4
#: The most queries of a launch.
QUERIES = 128
#: The most elements that the merged outputs of a launch have.
ELEMENTS = 2**21
#: Chunks begin at multiples of this number of entries, which is a multiple of every tile's size.
CHUNK = 256
#: Number of pipeline stages: enough to load the next tile's slots, K and V while a tile is multiplied.
NUM_STAGES = 5


@triton.jit(do_not_specialize=["total", "num_slots", "table_rows", "rotations", "reach"])
def chunk_kernel(
    query,  # [rows * NEW, heads, K_DIM]; if LATENT, [rows * NEW, heads, V_DIM + K_DIM]
    keys,  # [num_slots, kv_heads, K_DIM]
    values,  # [num_slots, kv_heads, V_DIM]
    begin,  # int32 [rows]
    end,  # int32 [rows]
    kv_indices,  # int32 [total]
    shift,  # int32 [total], read only if HALF and not ROTATES
    cosines,  # fp32 [table_rows, HALF], unused unless HALF
    sines,
    table_rows,
    tile_ptr,  # int32 [total // ENTRIES + rows + 1], unused unless ROTATES, see ``row_plan.Rotations``
    by,  # int32 [rotations]: by how many positions, unused unless ROTATES
    bits,  # int64 [rotations], unused unless ROTATES
    rotations,
    sees,  # int64 [rows * NEW], unused if NEW is 1; bit i: the query sees the row's i-th new entry
    reach,  # how many positions a query sees, unused unless WINDOW
    parts,  # fp32 [rows, kv_heads, GROUP, SPLITS, V_DIM]: outputs of the chunks
    part_lse,  # fp32 [rows, kv_heads, GROUP, SPLITS]: log-sum-exp of the chunks' logits, base 2
    total,
    num_slots,
    q_row_stride,
    q_head_stride,
    k_slot_stride,
    k_head_stride,
    v_slot_stride,
    v_head_stride,
    scale,
    logit_cap,
    ELEMENT: tl.constexpr,
    EXACT: tl.constexpr,  # the query has the type in which products are computed
    CAPPED: tl.constexpr,
    HALF: tl.constexpr,  # 0: nothing is rotated
    NEOX: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_COLS: tl.constexpr,
    V_COLS: tl.constexpr,
    NEW: tl.constexpr,  # number of queries of a row; a row's last NEW entries are its new entries
    GROUP: tl.constexpr,  # number of query heads per KV head, of all NEW queries
    HEADS: tl.constexpr,  # lines (rows) of a program's matrix products, at least 16
    USES: tl.constexpr,  # number of rotations in a product; 1 unless ROTATES
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    ROTATES: tl.constexpr,
    ENTRIES: tl.constexpr,
    LATENT: tl.constexpr,  # MLA: the first V_DIM dims of a query are multiplied with ``values``
    WINDOW: tl.constexpr,  # the queries of a row (NEW > 1) see ``reach`` positions each
):
    """Grid (kv_heads * cdiv(GROUP, HEADS), SPLITS, rows).

    A tensor core computes at least 16 lines (rows of a product) at once. If a KV head has at most 8 query heads
    and the plan has rotations (ROTATES), the lines hold each head USES times, under different rotations. Each
    line has its own maximum, weight and sums. At the end, the lines of a query head are merged, as chunks are.

    With several queries a row (NEW), the heads of all its queries share the row's keys and values. Each query
    sees all entries before the new ones, and those of the new ones that ``sees`` tells; with WINDOW no others
    than the last ``reach`` up to its own.
    """
    MEMBERS: tl.constexpr = HEADS // USES
    WIDE: tl.constexpr = HEADS == tiles.WIDE_LINES
    # For sm_100, Triton cannot compile a branch around products whose sums the loop over shifts takes.
    APART: tl.constexpr = WIDE and (ROTATES or HALF == 0)
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
        real_member = tl.minimum(member, GROUP - 1)
        token, head = tiles.query_of(kv_head, real_member, NEW, GROUP)
        k_column = tl.arange(0, K_COLS)
        v_column = tl.arange(0, V_COLS)
        q_at = query + row * NEW * q_row_stride
        q_at += (token * q_row_stride + head * q_head_stride)[:, None]
        if NEW > 1:
            word = tl.load(sees + row * NEW + token)
            if WINDOW:
                lowest = tiles.first_seen(word, count, NEW, reach)
        if LATENT:
            latent_at = q_at + v_column[None, :]
            latent_mask = (v_column < V_DIM)[None, :]
            latent = tl.load(latent_at, mask=latent_mask, other=0.0)
            q_at += V_DIM
        q_mask = (k_column < K_DIM)[None, :]
        queries = tl.load(q_at + k_column[None, :], mask=q_mask, other=0.0).to(tl.float32)
        keys += kv_head.to(tl.int64) * k_head_stride
        values += kv_head.to(tl.int64) * v_head_stride
        # As in FlashAttention, for each line: the largest logit so far, the sum of the weights
        # exp2(logit - m_i), and the sum of the weighted values.
        m_i = tl.full([HEADS], float("-inf"), tl.float32)
        l_i = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, V_COLS], tl.float32)
        # If all products are in branches, Triton pipelines only a loop that asks for it.
        stages: tl.constexpr = 2 if WIDE else None
        for at in tl.range(start, stop, TILE, num_stages=stages, disable_licm=True):
            inside = at < stop  # always, see ``times_apart``
            offset = tl.arange(0, TILE)
            entry = at + offset
            slot, ok = common.load_slots(kv_indices, first + entry, entry < stop, num_slots)
            readable = ok[None, :]
            if NEW > 1:
                readable &= tiles.visible(word, entry - (count - NEW))
                if WINDOW:
                    readable &= entry[None, :] >= lowest[:, None]
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
                unrotated = tiles.times_apart(
                    latent.to(tl.float32),
                    v.T,
                    unrotated,
                    inside,
                    APART,
                    ELEMENT,
                    EXACT,
                )
            # The tile's list of rotations.
            list_start = 0
            list_stop = 0
            if ROTATES:
                tile = first // ENTRIES + row + at // ENTRIES
                list_start = tl.maximum(tl.load(tile_ptr + tile), 0)
                list_stop = tl.minimum(tl.load(tile_ptr + tile + 1), rotations)
            if list_start < list_stop:
                p = tl.zeros([HEADS, TILE], tl.float32)
                m_ij = m_i
                # Not pipelined, because a pipeline of this loop would take memory from that of the outer loop.
                for listed in tl.range(list_start, list_stop, USES, num_stages=1):
                    back, seen = tiles.rotations(
                        by,
                        bits,
                        listed + use,
                        list_stop,
                        at % ENTRIES + offset,
                        readable,
                        table_rows,
                    )
                    qk = tiles.turned(
                        q_at,
                        q_mask,
                        k,
                        back[:, None],
                        cosines,
                        sines,
                        k_column,
                        unrotated,
                        ELEMENT,
                        HALF,
                        NEOX,
                    )
                    qk = tiles.logits(qk, seen, scale, logit_cap, CAPPED)
                    m_next = tl.maximum(m_ij, tl.max(qk, axis=1))
                    base = tiles.finite(m_next)
                    p = p * tl.exp2(m_ij - base)[:, None] + tl.exp2(qk - base[:, None])
                    m_ij = m_next
            else:
                qk = tiles.times_apart(
                    queries,
                    k,
                    unrotated,
                    inside,
                    APART,
                    ELEMENT,
                    EXACT,
                )
                if HALF > 0 and not ROTATES:
                    s_at = shift + first + entry
                    some = tl.load(s_at, mask=ok, other=0) != 0
                    if tl.max(some.to(tl.int32), axis=0) != 0:
                        # ``left``: each entry's shift until it is applied, then 0. The shifts are loaded again
                        # in the threads that need them, because a 1-bit mask like ``some`` cannot move there.
                        left = tl.load(s_at, mask=ok, other=0)
                        sound = (left > -table_rows) & (left < table_rows)
                        qk = tl.where(sound[None, :], qk, float("-inf"))
                        left = tl.where(sound, left, 0)
                        next_shift = tiles.next_shift(left)
                        while next_shift != 0:
                            turned = tiles.turned(
                                q_at,
                                q_mask,
                                k,
                                next_shift,
                                cosines,
                                sines,
                                k_column,
                                unrotated,
                                ELEMENT,
                                HALF,
                                NEOX,
                            )
                            qk = tl.where(left[None, :] == next_shift, turned, qk)
                            left = tl.where(left == next_shift, 0, left)
                            next_shift = tiles.next_shift(left)
                qk = tiles.logits(qk, readable, scale, logit_cap, CAPPED)
                if USES > 1:
                    qk = tl.where(use[:, None] == 0, qk, float("-inf"))
                m_ij = tl.maximum(m_i, tl.max(qk, axis=1))
                p = tl.exp2(qk - tiles.finite(m_ij)[:, None])
            if not LATENT:
                v = tl.load(v_at, mask=v_mask, other=0)
            alpha = tl.exp2(m_i - tiles.finite(m_ij))
            l_i = l_i * alpha + tl.sum(p, axis=1)
            acc = tiles.times_apart(p, v, acc * alpha[:, None], inside, WIDE, ELEMENT, False)
            m_i = m_ij
        if USES > 1:
            m_lines = tl.reshape(m_i, [USES, MEMBERS])
            m_i = tl.max(m_lines, axis=0)
            alpha = tl.exp2(m_lines - tiles.finite(m_i)[None, :])
            l_i = tl.sum(tl.reshape(l_i, [USES, MEMBERS]) * alpha, axis=0)
            acc = tl.reshape(acc, [USES, MEMBERS, V_COLS])
            acc = tl.sum(acc * alpha[:, :, None], axis=0)
            member = tl.arange(0, MEMBERS)
        real = member < GROUP
        unit = (row * heads + kv_head * GROUP + member) * SPLITS + split
        nothing = l_i == 0
        result = acc / tl.where(nothing, 1.0, l_i)[:, None]
        lse = tl.where(nothing, float("-inf"), m_i + tl.log2(l_i))
        tl.store(part_lse + unit, lse, mask=real)
        o_mask = real[:, None] & (v_column < V_DIM)[None, :]
        tl.store(parts + (unit * V_DIM)[:, None] + v_column[None, :], result, mask=o_mask)


@triton.jit(do_not_specialize=["total"])
def merge_kernel(
    parts,  # written by the chunk kernel
    part_lse,
    begin,
    end,
    sinks,  # fp32 [heads], unused unless SINKS
    out,  # [rows * NEW, heads, V_DIM]
    total,
    out_row_stride,
    out_head_stride,
    SINKS: tl.constexpr,
    NEW: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    V_COLS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (heads * NEW, rows). Merges the chunks of a query head."""
    unit = tl.program_id(0)
    token, head = tiles.query_of(unit // GROUP, unit % GROUP, NEW, GROUP)
    row = tl.program_id(1).to(tl.int64)
    unit += row * tl.num_programs(0)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, V_COLS)
    _first, count = common.span_of(begin, end, row, total)
    start, stop = common.piece_of(count, split, SPLITS, CHUNK)
    used = start < stop
    lse = tl.load(part_lse + unit * SPLITS + split, mask=used, other=float("-inf"))
    at = (unit * SPLITS + split)[:, None] * V_DIM + column[None, :]
    mask = used[:, None] & (column < V_DIM)[None, :]
    part = tl.load(parts + at, mask=mask, other=0.0)
    m = tl.max(lse, axis=0)
    sink = float("-inf")
    if SINKS:
        sink = tl.load(sinks + head) * tiles.LOG2E
        m = tl.maximum(m, sink)
    base = tiles.finite(m)
    alpha = tl.exp2(lse - base)
    l_sum = tl.sum(alpha, axis=0) + tl.exp2(sink - base)
    result = tl.sum(part * alpha[:, None], axis=0) / tl.where(l_sum == 0, 1.0, l_sum)
    o_at = out + (row * NEW + token) * out_row_stride + head * out_head_stride + column
    tl.store(o_at, result.to(out.dtype.element_ty), mask=column < V_DIM)


def compiler_options(constants: dict[str, Any]) -> dict[str, int]:
    """Triton's options for :func:`chunk_kernel`: enough warps to hold a program's data in registers."""
    element = constants["ELEMENT"]
    by_hand = element in ("e4m3", "e5m2") and not cuda_capability_geq(8, 9)
    columns = max(constants["K_COLS"], constants["V_COLS"])
    many_lines = constants["HEADS"] > tiles.FEWEST_LINES
    wide = columns > 128 or many_lines or element == "fp32" or by_hand
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
    new: int = 1,
    window: bool = False,
) -> dict[str, Any]:
    """Compile-time arguments of :func:`chunk_kernel`. ``rotation``: None if no entry is shifted. ``new``:
    number of queries of a row. ``window``: whether these see a window each."""
    group = query.shape[1] // keys.shape[1] * new
    element_size = keys.element_size()
    k_cols = tiles.columns(keys.shape[2])
    v_cols = tiles.columns(values.shape[2])
    columns = max(k_cols, v_cols)
    # fp8 is multiplied as fp16.
    exact = query.dtype == (torch.float16 if element_size == 1 else keys.dtype)
    if latent and columns <= tiles.LATENT_COLUMNS:
        lines, entries = tiles.latent_shape(group, element_size, exact)
    else:
        lines = tiles.lines(group, columns)
        entries = tiles.tile(columns, element_size)
    return dict(
        ELEMENT=common.ELEMENT[keys.dtype],
        EXACT=exact,
        CAPPED=capped,
        **common.rotary_constants(rotation),
        K_DIM=keys.shape[2],
        V_DIM=values.shape[2],
        K_COLS=k_cols,
        V_COLS=v_cols,
        NEW=new,
        GROUP=group,
        HEADS=lines,
        USES=lines // min(lines, triton.next_power_of_2(group)) if rotates else 1,
        SPLITS=SPLITS,
        CHUNK=CHUNK,
        TILE=entries,
        ROTATES=rotates,
        ENTRIES=ENTRIES,
        LATENT=latent,
        WINDOW=window,
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
    sees: torch.Tensor | None = None,
    reach: int = 0,
) -> None:
    """See :func:`sglang_reasoncache.kernels.decode.decode_attention`. Waits for nothing. The chunks' outputs
    take ``min(batch, QUERIES) * heads * v_dim * SPLITS`` fp32 numbers, but at most ``ELEMENTS * SPLITS``."""
    batch = len(spans[0])
    if not batch:
        return
    new = 1 if sees is None else sees.shape[1]
    heads = query.shape[1] * new
    keys = kv.keys
    values = kv.values
    v_dim = values.shape[2]
    rotates = plan.rotations is not None
    rotation = kv.rotation if rotates or plan.shift is not None else None
    fixed = constants(
        query,
        keys,
        values,
        rotation,
        capped=logit_cap > 0,
        rotates=rotates,
        latent=kv.latent,
        new=new,
        window=reach > 0,
    )
    options = compiler_options(fixed)
    rows = min(batch, QUERIES, max(1, ELEMENTS // (heads * v_dim)))
    if rows >= _ALIGNED:
        # Triton compiles a kernel anew for addresses that are not aligned as those of the first requests.
        rows -= rows % _ALIGNED if rows < batch else 0
    part_lse = query.new_empty((rows, heads, SPLITS), dtype=torch.float32)
    parts = part_lse.new_empty((rows, heads, SPLITS, v_dim))
    blocks = keys.shape[1] * triton.cdiv(fixed["GROUP"], fixed["HEADS"])
    shift, cosines, sines, table_rows = common.rotary_arguments(
        plan.shift, rotation, plan.kv_indices, part_lse
    )
    with common.current_device(query.device):
        for first in range(0, batch, rows):
            queries = query[first * new : (first + rows) * new]
            outputs = out[first * new : (first + rows) * new]
            begin = spans[0][first : first + rows]
            end = spans[1][first : first + rows]
            if plan.rotations is None:
                # Triton needs a tensor for every pointer, even if the kernel does not read it.
                rotations = Rotations(begin, begin, begin)
                count = 0
            else:
                tile_ptr, by, bits = plan.rotations
                rotations = Rotations(tile_ptr[first:], by, bits)
                count = len(by)
            chunk_kernel[(blocks, SPLITS, len(begin))](
                query=queries,
                keys=common.as_read(keys),
                values=common.as_read(values),
                begin=begin,
                end=end,
                kv_indices=plan.kv_indices,
                shift=shift,
                cosines=cosines,
                sines=sines,
                table_rows=table_rows,
                tile_ptr=rotations.tile_ptr,
                by=rotations.by,
                bits=rotations.bits,
                rotations=count,
                sees=begin if sees is None else sees[first:],
                reach=reach,
                parts=parts,
                part_lse=part_lse,
                total=len(plan.kv_indices),
                num_slots=len(keys),
                q_row_stride=query.stride(0),
                q_head_stride=query.stride(1),
                k_slot_stride=keys.stride(0),
                k_head_stride=keys.stride(1),
                v_slot_stride=values.stride(0),
                v_head_stride=values.stride(1),
                scale=scale,
                logit_cap=logit_cap,
                **(fixed | options),
            )
            merge_kernel[(heads, len(begin))](
                parts=parts,
                part_lse=part_lse,
                begin=begin,
                end=end,
                sinks=part_lse if sinks is None else sinks,
                out=outputs,
                total=len(plan.kv_indices),
                out_row_stride=out.stride(0),
                out_head_stride=out.stride(1),
                SINKS=sinks is not None,
                NEW=new,
                GROUP=fixed["GROUP"],
                V_DIM=v_dim,
                V_COLS=fixed["V_COLS"],
                SPLITS=SPLITS,
                CHUNK=CHUNK,
            )
