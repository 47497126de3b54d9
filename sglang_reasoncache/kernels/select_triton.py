# SPDX-License-Identifier: Apache-2.0
"""Entries of some pages of a plan, the pages' bounds and what queries find there, on a GPU without a wait.

PyTorch does the rest of a selection, on tensors of an element a page. These kernels go by entries, keys
and bounds. With fixed shapes PyTorch would write every entry of a plan that is as wide as the context
several times over, read a whole page for each new token, and copy the bounds of all pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels import tile_triton as tiles

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers

#: Entries that a program copies.
TILE = 512
#: Keys of a page that a program reads at once, at most.
KEYS = 32
#: Logits kept at a time, in bytes.
LOGITS_BYTES = 272 << 20


@triton.jit(do_not_specialize=["count", "total", "capacity"])
def copy_kernel(
    begin,  # int64 [count], of each page: its first entry in the whole plan
    to,  # int64 [count]: its first entry among those that are read
    sizes,  # int64 [count]: how many are read, 0 or all
    kv_indices,  # int32 [total]
    shift,  # int32 [total]
    to_indices,  # int32 [capacity], written
    to_shift,  # int32 [capacity], written if SHIFTS
    count, total, capacity, SHIFTS: tl.constexpr, COLS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(count, PAGES),)."""
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    inside = page < count
    at = tl.arange(0, COLS)[None, :]
    source = tl.load(begin + page, mask=inside, other=0)[:, None] + at
    target = tl.load(to + page, mask=inside, other=0)[:, None] + at
    size = tl.load(sizes + page, mask=inside, other=0)[:, None]
    there = (at < size) & (source < total) & (target < capacity)
    tl.store(to_indices + target, tl.load(kv_indices + source, mask=there, other=0), mask=there)
    if SHIFTS:
        tl.store(to_shift + target, tl.load(shift + source, mask=there, other=0), mask=there)


def copy_pages(
    read: torch.Tensor, sizes: torch.Tensor, page: int, whole: PlanBuffers, *, shifted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots and shifts (None unless ``shifted``) of the entries that are read, row after row.

    Both are int32 and as long as those of ``whole``; what lies behind the last entry is anything.

    Args:
        read: int64 ``[batch, pages]``, entries of each page that are read: none, or all.
        sizes: int64 ``[batch, pages]``, entries of each page that the plan has.
        page: Most entries of a page.
        whole: The plan, every position an entry.
    """
    indices = torch.empty_like(whole.kv_indices)
    shift = torch.empty_like(indices) if shifted else None
    assert whole.shift is not None, "a plan that is not merged"
    sides = whole.kv_indices, whole.shift, indices, indices if shift is None else shift
    sizes, read = sizes.flatten(), read.flatten()
    begin, to = (counts.cumsum(0) - counts for counts in (sizes, read))
    columns, capacity = triton.next_power_of_2(page), len(indices)
    pages = max(1, TILE // columns)
    if len(read):
        with common.current_device(read.device):
            copy_kernel[triton.cdiv(len(read), pages),](
                *(begin, to, read, *sides, len(read), capacity, capacity),
                SHIFTS=shifted,
                COLS=columns,
                PAGES=pages,
            )
    return indices, shift


@triton.jit(do_not_specialize=["tokens", "num_slots"])
def bounds_kernel(
    keys,  # [num_slots, heads, DIM]
    slots,  # int32 or int64 [tokens]
    ends,  # [pages, heads, 2 * DIM], written
    tokens, num_slots, slot_stride, head_stride, ELEMENT: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, heads)."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    after = tl.load(slots + token + 1, mask=token + 1 < tokens, other=-1).to(tl.int64)
    place = (slot % PAGE).to(tl.int32)
    sound = (slot >= 0) & (slot < num_slots)
    # The last token written to a page computes the bounds of all its keys.
    if sound & ((place == PAGE - 1) | (after != slot + 1)):
        column = tl.arange(0, COLS)
        keys += (slot - place) * slot_stride + head.to(tl.int64) * head_stride
        high = tl.full([COLS], float("-inf"), tl.float32)
        low = tl.full([COLS], float("inf"), tl.float32)
        for some in range(0, place + 1, TILE):
            at = some + tl.arange(0, TILE)
            mask = (at <= place)[:, None] & (column < DIM)[None, :]
            where = keys + (at.to(tl.int64) * slot_stride)[:, None] + column[None, :]
            key = common.to_fp32(tl.load(where, mask=mask, other=0), ELEMENT)
            high = tl.maximum(high, tl.max(tl.where(mask, key, float("-inf")), axis=0))
            low = tl.minimum(low, tl.min(tl.where(mask, key, float("inf")), axis=0))
        to = ends + ((slot // PAGE) * tl.num_programs(1) + head) * (2 * DIM) + column
        tl.store(to, high.to(ends.dtype.element_ty), mask=column < DIM)
        tl.store(to + DIM, low.to(ends.dtype.element_ty), mask=column < DIM)


def note_bounds(keys: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, page: int) -> None:
    """Bring the bounds of pages of ``page`` slots up to date, after keys were written to ``slots``.

    A page is filled from its first slot on. Slots of one page lie side by side in ``slots`` and ascend;
    slots out of range are skipped. ``ends``: largest and least keys, of a dtype that holds the keys'.
    """
    if not len(slots):
        return
    heads, dim = keys.shape[1:]
    with common.current_device(keys.device):
        bounds_kernel[(len(slots), heads)](
            *(common.as_read(keys), slots.contiguous(), ends),
            *(len(slots), len(keys), *keys.stride()[:2]),
            ELEMENT=common.ELEMENT[keys.dtype],
            DIM=dim,
            COLS=triton.next_power_of_2(dim),
            PAGE=page,
            TILE=min(KEYS, triton.next_power_of_2(page)),
        )


@triton.jit(do_not_specialize=["count", "num_pages"])
def logits_kernel(
    query,  # [rows, heads, DIM]
    ends,  # [num_pages, kv_heads, DIM]
    pages,  # int64 [rows, count]; -1: not asked for
    out,  # fp32 [rows, heads, count], written; -inf where not asked for
    count, num_pages, q_row_stride, q_head_stride, page_stride, head_stride, scale,
    ELEMENT: tl.constexpr, EXACT: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr,
    GROUP: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(count, TILE), kv_heads * cdiv(GROUP, LINES), rows)."""
    blocks: tl.constexpr = (GROUP + LINES - 1) // LINES
    kv_head = tl.program_id(1) // blocks
    row = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) // blocks * GROUP
    member = tl.program_id(1) % blocks * LINES + tl.arange(0, LINES)
    head = kv_head * GROUP + tl.minimum(member, GROUP - 1)
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    page, ok = common.load_slots(pages + row * count, place, place < count, num_pages)
    column = tl.arange(0, COLS)
    inside = (column < DIM)[None, :]
    q_at = query + row * q_row_stride + (head * q_head_stride)[:, None] + column[None, :]
    q = tl.load(q_at, mask=inside, other=0.0).to(tl.float32)
    at = ends + (page * page_stride + kv_head * head_stride)[:, None] + column[None, :]
    end = tl.load(at, mask=ok[:, None] & inside, other=0).T
    found = tiles.times(q, end, tl.zeros([LINES, TILE], tl.float32), ELEMENT, EXACT) * scale
    to = out + ((row * heads + head) * count)[:, None] + place[None, :]
    mask = (member < GROUP)[:, None] & (place < count)[None, :]
    tl.store(to, tl.where(ok[None, :], found, float("-inf")), mask=mask)


def constants(query: torch.Tensor, ends: torch.Tensor) -> dict[str, Any]:
    """Compile-time arguments of :func:`logits_kernel`."""
    cols, group = tiles.columns(query.shape[2]), query.shape[1] // ends.shape[1]
    return dict(
        ELEMENT=common.ELEMENT[ends.dtype],
        EXACT=query.dtype == ends.dtype,
        DIM=query.shape[2],
        COLS=cols,
        GROUP=group,
        LINES=tiles.lines(group, cols),
        TILE=tiles.tile(cols, ends.element_size()),
    )


def page_shares(
    query: torch.Tensor, ends: torch.Tensor, pages: torch.Tensor, scale: float
) -> torch.Tensor:
    """Each head's softmax of ``scale * query . ends`` over a row's pages, added up over the heads.

    Args:
        query: ``[rows, heads, dim]``.
        ends: ``[num_pages, kv_heads, dim]``.
        pages: int64 ``[rows, count]``; -1 takes no share.

    Returns:
        fp32 ``[rows, count]``; NaN in rows without a page.
    """
    heads, count, found = query.shape[1], pages.shape[1], []
    at_once = max(1, LOGITS_BYTES // max(4 * heads * count, 1))
    fixed = constants(query, ends)
    blocks = ends.shape[1] * triton.cdiv(fixed["GROUP"], fixed["LINES"])
    for some, where in zip(query.split(at_once), pages.split(at_once), strict=True):
        logits = ends.new_empty((len(some), heads, count), dtype=torch.float32)
        if logits.numel():
            with common.current_device(query.device):
                logits_kernel[triton.cdiv(count, fixed["TILE"]), blocks, len(some)](
                    *(some, ends, where, logits, count, len(ends)),
                    *(*some.stride()[:2], *ends.stride()[:2], scale),
                    **fixed,
                )
        found.append(logits.softmax(dim=2).sum(dim=1))
    return torch.cat(found)
