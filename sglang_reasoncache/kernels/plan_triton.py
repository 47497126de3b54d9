# SPDX-License-Identifier: Apache-2.0
"""Makes plans on a GPU. The host never waits for the device, so planning can be part of a CUDA graph.

The size of a launch grid depends only on the number of requests in the batch. Each row is cut into ``PIECES``
pieces: a first launch counts the entries of every piece, PyTorch adds the counts up, and a second launch writes
the entries. For merged plans both launches also count and write *runs*: neighbouring positions with the
same shift (but not 0). ``rotations_triton`` turns runs into rotations."""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels import rotations_triton
from sglang_reasoncache.kernels.rotations_triton import MergeBuffers, RowReads
from sglang_reasoncache.kernels.row_plan import TILE as ENTRIES
from sglang_reasoncache.kernels.row_plan import Rotations, RowPlan

#: Number of programs for each row.
PIECES = 16
#: Number of positions that a program reads at once.
TILE = 512


@triton.jit(do_not_specialize=["num_rows", "width", "reach", "num_slots", "stride", "capacity"])
def plan_kernel(
    rows,  # int32 [num_rows, width]
    requests,  # int32 or int64 [batch]
    lengths,  # int32 or int64 [batch]
    cached_at,  # int32 [num_slots], read only if SHIFTS or MERGE
    runs,  # int32 [2, capacity], written if MERGE: first and last position of each run
    run_indptr,  # int32 [batch + 1], read only if MERGE: where each request's runs begin
    counts,  # int32 [1 + MERGE, batch, PIECES]: entry and run counts; read if WRITE, else written
    kv_indptr,  # int32 [batch + 1]
    kv_indices,  # int32 [capacity], written
    shift,  # int32 [capacity], written unless MERGE
    positions,  # int32 [capacity], written if MERGE: entries' positions; the first one read is 0
    num_rows,
    width,
    row_stride,
    reach,
    num_slots,
    stride,
    capacity,
    SHIFTS: tl.constexpr,
    MERGE: tl.constexpr,
    WRITE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (PIECES, batch). If WRITE, writes the entries and runs of every piece, else counts them."""
    piece = tl.program_id(0)
    request = tl.program_id(1)
    rows, length, first = common.row_of(
        rows, requests, lengths, request, num_rows, width, row_stride, reach
    )
    start, stop = common.piece_of(length, piece, PIECES, TILE)
    num_kept = tl.zeros([TILE], tl.int32)
    num_runs = tl.zeros([TILE], tl.int32)
    if WRITE:
        to = common.first_target(kv_indptr, counts, request, piece, PIECES)
        if MERGE:
            run_to = common.first_target(run_indptr, counts + stride, request, piece, PIECES)
    for some in range(start, stop, TILE):
        position = some + tl.arange(0, TILE)
        inside = position < stop
        if MERGE:
            slot, home, kind = common.look(rows, cached_at, position, length, first, num_slots)
            _slot, last, was = common.look(rows, cached_at, position - 1, length, first, num_slots)
            kept = inside & (kind != common.EVICTED) & (kind != common.ALIAS)
            moved = inside & ((kind == common.SHIFTED) | (kind == common.ALIAS))
            begins = moved & ((was != kind) | (last + 1 != home))
        else:
            slot = tl.load(rows + position, mask=inside, other=-1)
            kept = (slot >= 0) & (slot < num_slots)
            begins = kept & (slot < 0)
        if WRITE:
            if MERGE:
                run_at, run_fits, run_to = common.targets(begins, run_to, capacity)
                tl.store(runs + run_at, position, mask=run_fits)
                _slot, then, goes_on = common.look(
                    rows, cached_at, position + 1, length, first, num_slots
                )
                ends = moved & ((goes_on != kind) | (then != home + 1))
                # ``run_at``: each position's run. If the run began before this tile, it was written last.
                run_at += begins.to(tl.int32) - 1
                ends &= (run_at >= 0) & (run_at < capacity)
                tl.store(runs + capacity + run_at, position, mask=ends)
            at, fits, to = common.targets(kept, to, capacity)
            tl.store(kv_indices + at, slot, mask=fits)
            if MERGE:
                tl.store(positions + at, position, mask=fits)
            else:
                by = tl.zeros([TILE], tl.int32)
                if SHIFTS:
                    by = first + position - tl.load(cached_at + slot, mask=fits, other=0)
                tl.store(shift + at, by, mask=fits)
        else:
            num_kept += kept.to(tl.int32)
            num_runs += begins.to(tl.int32)
    if not WRITE:
        at_count = counts + request * PIECES + piece
        tl.store(at_count, tl.sum(num_kept, axis=0))
        if MERGE:
            tl.store(at_count + stride, tl.sum(num_runs, axis=0))


@dataclasses.dataclass(frozen=True)
class PlanBuffers:
    """Memory for plans of up to ``batch`` requests and ``capacity`` entries, used again for every plan."""

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [capacity]; undefined beyond the last entry
    counts: torch.Tensor  # int32 [1 + merge, batch, PIECES], used only while planning
    shift: torch.Tensor | None  # int32 [capacity], like kv_indices; None with ``merge``
    merge: MergeBuffers | None = None  # None if plans are not merged

    @classmethod
    def of(
        cls, batch: int, capacity: int, device: torch.device | str, *, merge: bool = False
    ) -> PlanBuffers:
        # Buffers of zeros hold an empty plan.
        made = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        return cls(
            made(batch + 1),
            made(capacity),
            made(1 + merge, batch, PIECES),
            None if merge else made(capacity),
            MergeBuffers.of(batch, capacity, device) if merge else None,
        )

    @property
    def batch(self) -> int:
        """The largest number of requests that a plan can have."""
        return self.counts.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        buffers = [self.kv_indptr, self.kv_indices, self.counts]
        if self.shift is not None:
            buffers.append(self.shift)
        if self.merge is not None:
            buffers += self.merge.buffers()
        return sum(buffer.nbytes for buffer in buffers)

    def plan_of(self, batch: int) -> RowPlan:
        """The plan of ``batch`` requests in these buffers. ``kv_indptr`` and ``tile_ptr`` are cut to
        fit ``batch``; the other tensors keep their full size."""
        rotations = None
        if self.merge is not None:
            tile_ptr, by, bits = self.merge.rotations
            tiles = len(self.kv_indices) // ENTRIES + batch
            rotations = Rotations(tile_ptr[: tiles + 1], by, bits)
        return RowPlan(self.kv_indptr[: batch + 1], self.kv_indices, self.shift, rotations)


def plan_into(
    buffers: PlanBuffers,
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None = None,
    *,
    num_slots: int,
    reach: int = 0,
) -> RowPlan:
    """Plan a batch into ``buffers``, without waiting for the device. Returns ``buffers.plan_of(batch)``.

    Arguments are those of :func:`sglang_reasoncache.kernels.plan.plan_rows`. ``requests`` and ``lengths`` may
    be int32 or int64. The host cannot check values, so the kernels do: a request without a row gets no entries,
    a length is cut at the row's end, and entries that are not slots or exceed the capacity are skipped. Without
    ``cached_at`` all shifts are 0. Buffers made with ``merge`` need ``cached_at``; their plans have rotations.

    Raises:
        ValueError: more requests than the buffers are for; ``rows`` whose last dimension is not contiguous."""
    batch = len(requests)
    merge = buffers.merge
    if batch > buffers.batch:
        raise ValueError(f"plan: {batch} requests, the buffers are for {buffers.batch}")
    if rows.stride(1) != 1:
        raise ValueError(f"plan: positions of a row must lie side by side, got {rows.stride()}")
    if not batch:
        return buffers.plan_of(0)
    counts = buffers.counts
    capacity = len(buffers.kv_indices)
    read = RowReads(
        rows=rows,
        requests=requests.contiguous(),
        lengths=lengths.contiguous(),
        # Triton needs a tensor even for arguments that the kernel does not use: ``counts``.
        cached_at=counts if cached_at is None else cached_at.contiguous(),
        reach=reach or rows.shape[1],
        num_slots=num_slots,
    )
    pieces = counts.shape[2]
    launch = functools.partial(
        plan_kernel[pieces, batch],
        **read.arguments(),
        runs=counts if merge is None else merge.runs,
        run_indptr=counts if merge is None else merge.run_indptr,
        counts=counts,
        kv_indptr=buffers.kv_indptr,
        kv_indices=buffers.kv_indices,
        shift=counts if buffers.shift is None else buffers.shift,
        positions=counts if merge is None else merge.positions,
        stride=counts.stride(0),
        capacity=capacity,
        SHIFTS=cached_at is not None,
        MERGE=merge is not None,
        PIECES=pieces,
        TILE=TILE,
    )
    indptrs = [buffers.kv_indptr] if merge is None else [buffers.kv_indptr, merge.run_indptr]
    with common.current_device(counts.device):
        launch(WRITE=False)
        for indptr, sizes in zip(indptrs, counts[:, :batch].sum(2), strict=True):
            indptr[1 : batch + 1] = sizes.cumsum(0).clamp_(max=capacity)
        launch(WRITE=True)
    if merge is not None:
        rotations_triton.rotate(merge, batch, read, buffers.kv_indptr)
    return buffers.plan_of(batch)
