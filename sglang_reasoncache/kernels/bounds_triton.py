# SPDX-License-Identifier: Apache-2.0
"""The least and largest key of each page that was written to, on a GPU and without a wait.

One launch whose grid depends on the number of tokens. It reads a page's keys so far from the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels.common_triton import ELEMENT, as_read, current_device, to_fp32

#: Keys a program reads at once, at most.
TILE = 32


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
            key = to_fp32(tl.load(where, mask=mask, other=0), ELEMENT)
            high = tl.maximum(high, tl.max(tl.where(mask, key, float("-inf")), axis=0))
            low = tl.minimum(low, tl.min(tl.where(mask, key, float("inf")), axis=0))
        to = ends + ((slot // PAGE) * tl.num_programs(1) + head) * (2 * DIM) + column
        tl.store(to, high.to(ends.dtype.element_ty), mask=column < DIM)
        tl.store(to + DIM, low.to(ends.dtype.element_ty), mask=column < DIM)


def note(keys: torch.Tensor, slots: torch.Tensor, ends: torch.Tensor, page: int) -> None:
    """Bring the bounds of pages of ``page`` slots up to date, after keys were written to ``slots``.

    A page is filled from its first slot on; its ``slots`` lie side by side and ascend, those out of
    range are skipped. ``ends`` are the largest and least keys, of a dtype that holds the keys'.
    """
    if not len(slots):
        return
    heads, dim = keys.shape[1:]
    with current_device(keys.device):
        bounds_kernel[(len(slots), heads)](
            *(as_read(keys), slots.contiguous(), ends),
            *(len(slots), len(keys), *keys.stride()[:2]),
            ELEMENT=ELEMENT[keys.dtype],
            DIM=dim,
            COLS=triton.next_power_of_2(dim),
            PAGE=page,
            TILE=min(TILE, triton.next_power_of_2(page)),
        )
