# SPDX-License-Identifier: Apache-2.0
"""The row planner on a GPU: no wait for the device, so it can run inside a CUDA graph.

Three launches whose grids depend on the batch alone. Each row is cut into ``PIECES``; the first
counts the entries of every piece, the second makes ``kv_indptr`` of the counts, the third writes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.row_plan import RowPlan

#: Programs of a row.
PIECES = 16
#: Positions a program reads at once.
TILE = 512
#: Requests the second launch adds up at once.
REQUESTS = 32

_NOT_SPECIALIZED = ["num_rows", "width", "num_slots", "capacity", "batch"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def plan_kernel(
    rows,  # int32 [num_rows, width]
    requests,  # int32 or int64 [batch]
    lengths,  # likewise
    cached_at,  # int32 [num_slots], unused unless SHIFTS
    counts,  # int32 [batch, PIECES], written unless WRITE
    kv_indptr,  # int32 [batch + 1]
    kv_indices,  # int32 [capacity], written
    shift,  # int32 [capacity], written
    positions,  # int32 [capacity], written if POSITIONS
    num_rows, width, row_stride, num_slots, capacity, SHIFTS: tl.constexpr, POSITIONS: tl.constexpr,
    WRITE: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (PIECES, batch). Counts the entries of every piece, or writes them."""
    piece = tl.program_id(0)
    request = tl.program_id(1)
    row = tl.load(requests + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int64)
    sound = (row >= 0) & (row < num_rows) & (length > 0)
    length = tl.where(sound, tl.minimum(length, width), 0).to(tl.int32)
    start, stop = common.piece_of(length, piece, PIECES, TILE)
    rows += tl.where(sound, row, 0) * row_stride
    found = tl.zeros([TILE], tl.int32)
    if WRITE:
        to = common.first_target(kv_indptr, counts, request, piece, PIECES)
    for some in range(start, stop, TILE):
        position = some + tl.arange(0, TILE)
        slot = tl.load(rows + position, mask=position < stop, other=-1)
        kept = (slot >= 0) & (slot < num_slots)
        if WRITE:
            at, fits, to = common.targets(kept, to, capacity)
            tl.store(kv_indices + at, slot, mask=fits)
            if POSITIONS:
                tl.store(positions + at, position, mask=fits)
            by = tl.zeros([TILE], tl.int32)
            if SHIFTS:
                by = position - tl.load(cached_at + slot, mask=fits, other=0)
            tl.store(shift + at, by, mask=fits)
        else:
            found += kept.to(tl.int32)
    if not WRITE:
        tl.store(counts + request * PIECES + piece, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def scan_kernel(
    counts,  # int32 [batch, PIECES]
    kv_indptr,  # int32 [batch + 1], written
    batch, capacity, PIECES: tl.constexpr, REQUESTS: tl.constexpr,
):  # fmt: skip
    """Grid (1,)."""
    tl.store(kv_indptr, 0)
    before = tl.zeros([], tl.int64)
    for some in range(0, batch, REQUESTS):
        request = some + tl.arange(0, REQUESTS)
        inside = request < batch
        at = request[:, None] * PIECES + tl.arange(0, PIECES)[None, :]
        count = tl.sum(tl.load(counts + at, mask=inside[:, None], other=0), axis=1).to(tl.int64)
        after = tl.minimum(before + tl.cumsum(count, axis=0), capacity)
        tl.store(kv_indptr + 1 + request, after.to(tl.int32), mask=inside)
        before += tl.sum(count, axis=0)


@dataclasses.dataclass(frozen=True)
class PlanBuffers:
    """Memory for plans of up to ``batch`` requests and ``capacity`` entries, step after step."""

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [capacity]; anything beyond the last entry
    shift: torch.Tensor  # int32 [capacity], likewise
    counts: torch.Tensor  # int32 [batch, PIECES], of the kernels' own use
    #: int32 ``[capacity]``, of the entries in their rows; None where nobody asks.
    positions: torch.Tensor | None = None

    @classmethod
    def of(
        cls, batch: int, capacity: int, device: torch.device | str, *, positions: bool = False
    ) -> PlanBuffers:
        # Zeros are an empty plan.
        made = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        sides = made(batch + 1), made(capacity), made(capacity), made((batch, PIECES))
        return cls(*sides, made(capacity) if positions else None)

    @property
    def batch(self) -> int:
        """Most requests of a plan."""
        return len(self.counts)

    def plan_of(self, batch: int) -> RowPlan:
        """What was planned for ``batch`` requests, over the whole capacity."""
        return RowPlan(self.kv_indptr[: batch + 1], self.kv_indices, self.shift)

    def fill(self, kernel: Any, batch: int, *sizes: Any, read: Any, **fixed: Any) -> None:
        """Launch ``kernel`` twice: it counts entries, of which ``kv_indptr`` is made, and writes."""
        pieces, capacity = self.counts.shape[1], len(self.kv_indices)
        positions = self.counts if self.positions is None else self.positions
        written = self.counts, self.kv_indptr, self.kv_indices, self.shift, positions
        with common.current_device(self.counts.device):
            for write in (False, True):
                if write:
                    scan = dict(PIECES=pieces, REQUESTS=REQUESTS)
                    scan_kernel[(1,)](self.counts, self.kv_indptr, batch, capacity, **scan)
                if batch:
                    arguments = *read, *written, *sizes, capacity
                    kernel[(pieces, batch)](*arguments, WRITE=write, PIECES=pieces, **fixed)


def plan_into(
    buffers: PlanBuffers,
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None = None,
    *,
    num_slots: int,
) -> RowPlan:
    """Flatten the rows of a batch into ``buffers``, without a wait; ``buffers.plan_of(batch)``.

    Arguments are those of :func:`sglang_reasoncache.kernels.plan.plan_rows`, int32 and int64 alike.
    The host reads no values. A request that is not a row has no entries, a length beyond the row is
    cut to it, an entry that is no slot is skipped, and so are entries past the capacity. Without
    ``cached_at`` all shifts are 0.

    Raises:
        ValueError: more requests than the buffers are for.
    """
    batch = len(requests)
    if batch > buffers.batch:
        raise ValueError(f"plan: {batch} requests, the buffers are for {buffers.batch}")
    if rows.stride(1) != 1:
        raise ValueError(f"plan: positions of a row must lie side by side, got {rows.stride()}")
    tensors = rows, requests.contiguous(), lengths.contiguous()
    buffers.fill(
        plan_kernel,
        batch,
        *(*rows.shape, rows.stride(0), num_slots),
        read=(*tensors, buffers.counts if cached_at is None else cached_at.contiguous()),
        SHIFTS=cached_at is not None,
        POSITIONS=buffers.positions is not None,
        TILE=TILE,
    )
    return buffers.plan_of(batch)
