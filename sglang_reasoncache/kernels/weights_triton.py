# SPDX-License-Identifier: Apache-2.0
"""Softmax weights of entries on a GPU, of the logits that decode attention put aside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels.common_triton import piece_of, span_of

#: Programs of a query.
PIECES = 64
#: Entries a program reads at once.
TILE = 128
#: Heads it reads at once: one after the other, each would wait for the memory.
HEADS = 16
#: Logits kept at a time, of all queries of a launch. Not a power of 2: contexts are one, and
#: SGLang's rows a few positions longer.
LOGITS_BYTES = 272 << 20

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["total", "width", "size"])
def weights_kernel(
    logits,  # fp32 [rows, heads, width]: base 2
    lse,  # fp32 [rows, heads]: natural
    begin,  # int32 [rows]
    end,  # int32 [rows]
    first,  # int32 or int64 [rows]: of each query's entries in ``weights``
    weights,  # fp32 [size], added to
    total,
    width,
    size,
    heads: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (PIECES, rows). An entry's weight is written by one program: always the same bits."""
    row = tl.program_id(1).to(tl.int64)
    _first, count = span_of(begin, end, row, total)
    count = tl.minimum(count, width)
    to = tl.load(first + row).to(tl.int64)
    start, stop = piece_of(count, tl.program_id(0), PIECES, TILE)
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


def add(
    logits: torch.Tensor,
    lse: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    first: torch.Tensor,
    weights: torch.Tensor,
    total: int,
) -> None:
    """Add each entry's weight, summed over the heads; entries past the end are skipped."""
    rows, heads, width = logits.shape
    some = min(HEADS, triton.next_power_of_2(heads))
    weights_kernel[(PIECES, rows)](
        *(logits, lse, begin, end, first, weights),
        *(total, width, len(weights)),
        **dict(heads=heads, HEADS=some, PIECES=PIECES, TILE=TILE),
    )
