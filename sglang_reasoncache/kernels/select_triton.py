# SPDX-License-Identifier: Apache-2.0
"""Some entries of a plan, by pages of their rows, and the pages' bounds, on a GPU without a wait.

Layers read no rows, which may change while a forward runs, but the plan that was made of them.
Grids depend on the batch alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.plan_triton import PlanBuffers

#: Entries a program reads at once.
TILE = 512
#: Pages a program settles at once.
PAGES = 256
#: Keys of a page that a program reads at once, at most.
KEYS = 32

#: What a row has of a page: nothing; keys that may be left out; keys that are read in any case.
ABSENT, OPTIONAL, ALWAYS = 0, 1, 2

_OPTIONAL, _ALWAYS = tl.constexpr(OPTIONAL), tl.constexpr(ALWAYS)


@triton.jit(do_not_specialize=["pages", "budget"])
def settle_kernel(
    asked,  # uint8 [batch, pages]
    state,  # uint8 [batch, pages]: ABSENT, OPTIONAL or ALWAYS
    lengths,  # int64 [batch]
    keep,  # uint8 [batch, pages], written as far as rows are long
    totals,  # int64 [3], added to: positions held, positions read, newest pages not asked for
    pages, budget, PAGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (batch,)."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), pages * PAGE).to(tl.int32)
    whole = length <= budget
    newest = (length - 1) // PAGE
    zeros = tl.zeros([TILE], tl.int32)
    held, read, missing = zeros, zeros, zeros
    for some in range(0, tl.cdiv(length, PAGE), TILE):
        page = some + tl.arange(0, TILE)
        inside = page * PAGE < length
        kind = tl.load(state + row * pages + page, mask=inside, other=0)
        wanted = tl.load(asked + row * pages + page, mask=inside, other=0) != 0
        last = page == newest
        there = (kind == _OPTIONAL) | (kind == _ALWAYS)
        kept = there & (wanted | last | (kind == _ALWAYS) | whole)
        tl.store(keep + row * pages + page, kept.to(tl.uint8), mask=inside)
        size = tl.where(there, tl.minimum(length - page * PAGE, PAGE), 0)
        held += size
        read += tl.where(kept, size, 0)
        missing += (there & last & (wanted == 0)).to(tl.int32)
    if length > budget:
        tl.atomic_add(totals, tl.sum(held, axis=0).to(tl.int64))
        tl.atomic_add(totals + 1, tl.sum(read, axis=0).to(tl.int64))
        tl.atomic_add(totals + 2, tl.sum(missing, axis=0).to(tl.int64))


@triton.jit
def _span_of(kv_indptr, request, piece, PIECES: tl.constexpr, TILE: tl.constexpr):
    """Entries of a program."""
    begin = tl.load(kv_indptr + request)
    start, stop = common.piece_of(tl.load(kv_indptr + request + 1) - begin, piece, PIECES, TILE)
    return begin + start, begin + stop


@triton.jit(do_not_specialize=["pages", "capacity"])
def select_kernel(
    kv_indptr,  # int32 [batch + 1]
    kv_indices,  # int32 [entries]
    shift,  # int32 [entries]
    positions,  # int32 [entries]
    keep,  # uint8 [batch, pages]
    counts,  # int32 [batch, PIECES], written unless WRITE
    to_indptr,  # int32 [batch + 1]
    to_indices,  # int32 [capacity], written
    to_shift,  # int32 [capacity], written
    to_entries,  # int32 [capacity], written: where they are in the whole plan
    pages, capacity, PAGE: tl.constexpr, WRITE: tl.constexpr, PIECES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (PIECES, batch). Counts the entries of every piece that are kept, or writes them."""
    piece = tl.program_id(0)
    request = tl.program_id(1)
    keep += request.to(tl.int64) * pages
    start, stop = _span_of(kv_indptr, request, piece, PIECES, TILE)
    found = tl.zeros([TILE], tl.int32)
    if WRITE:
        to = common.first_target(to_indptr, counts, request, piece, PIECES)
    for some in range(start, stop, TILE):
        entry = some + tl.arange(0, TILE)
        inside = entry < stop
        page = tl.load(positions + entry, mask=inside, other=0) // PAGE
        known = inside & (page >= 0) & (page < pages)
        kept = known & (tl.load(keep + page, mask=known, other=0) != 0)
        if WRITE:
            at, fits, to = common.targets(kept, to, capacity)
            tl.store(to_indices + at, tl.load(kv_indices + entry, mask=fits, other=0), mask=fits)
            tl.store(to_shift + at, tl.load(shift + entry, mask=fits, other=0), mask=fits)
            tl.store(to_entries + at, entry, mask=fits)
        else:
            found += kept.to(tl.int32)
    if not WRITE:
        tl.store(counts + request * PIECES + piece, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=["size"])
def add_kernel(
    weights,  # fp32 [capacity], read and zeroed
    kv_indptr,  # int32 [batch + 1], of the selected entries
    entries,  # int32 [capacity]
    whole,  # fp32 [size], added to
    size, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (PIECES, batch). No two entries go to one element."""
    start, stop = _span_of(kv_indptr, tl.program_id(1), tl.program_id(0), PIECES, TILE)
    for some in range(start, stop, TILE):
        entry = some + tl.arange(0, TILE)
        inside = entry < stop
        weight = tl.load(weights + entry, mask=inside, other=0.0)
        tl.store(weights + entry, tl.zeros([TILE], tl.float32), mask=inside)
        to = tl.load(entries + entry, mask=inside, other=-1)
        there = inside & (to >= 0) & (to < size)
        tl.store(whole + to, tl.load(whole + to, mask=there, other=0.0) + weight, mask=there)


def settle(
    asked: torch.Tensor,
    state: torch.Tensor,
    lengths: torch.Tensor,
    keep: torch.Tensor,
    totals: torch.Tensor,
    *,
    budget: int,
    page: int,
) -> None:
    """Pages that are read: those asked for, the newest, those always read, rows within the budget.

    Arguments are those of :func:`settle_kernel`, contiguous; ``asked`` is bool. ``totals`` are of
    rows longer than ``budget`` positions, which are not read whole.
    """
    tensors = asked.view(torch.uint8), state, lengths, keep, totals
    with common.current_device(state.device):
        settle_kernel[(len(lengths),)](*tensors, state.shape[1], budget, PAGE=page, TILE=PAGES)


def select_into(buffers: PlanBuffers, whole: PlanBuffers, keep: torch.Tensor, page: int) -> None:
    """The entries of ``whole`` that lie in pages to be read, in their order.

    Args:
        buffers: Written; its ``positions`` are where entries are in the whole plan. Entries past
            its capacity are skipped.
        keep: uint8 ``[batch, pages]``, 0: not read.
        page: Positions of a page.
    """
    assert whole.positions is not None and buffers.positions is not None
    batch, pages = keep.shape
    read = whole.kv_indptr, whole.kv_indices, whole.shift, whole.positions, keep
    buffers.fill(select_kernel, batch, pages, read=read, PAGE=page, TILE=TILE)


def add(weights: torch.Tensor, buffers: PlanBuffers, batch: int, whole: torch.Tensor) -> None:
    """Add the weights of entries that were selected into ``buffers`` to fp32 ``whole``, and zero them."""
    grid = (buffers.counts.shape[2], batch)
    selected = weights, buffers.kv_indptr, buffers.positions
    with common.current_device(weights.device):
        add_kernel[grid](*selected, whole, len(whole), PIECES=grid[0], TILE=TILE)


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
    # Of a page's tokens the last one sees them all.
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

    A page is filled from its first slot on; its ``slots`` lie side by side and ascend, those out of
    range are skipped. ``ends`` are the largest and least keys, of a dtype that holds the keys'.
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
