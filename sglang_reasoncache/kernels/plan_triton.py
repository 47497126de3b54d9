# SPDX-License-Identifier: Apache-2.0
"""The row planner on a GPU: no wait for the device, so it can run inside a CUDA graph.

Launches whose grids depend on the batch alone. Each row is cut into ``PIECES``: one launch counts
the entries of every piece, the next makes ``kv_indptr`` of the counts, the third writes. Three more
do the same with rotations. These are first written as runs, neighbouring positions whose slots are
at neighbouring positions of the row too, which are then cut by tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.row_plan import TILE as ENTRIES
from sglang_reasoncache.kernels.row_plan import Rotations, RowPlan

#: Programs of a row.
PIECES = 16
#: Positions a program reads at once.
TILE = 512
#: Requests the second launch adds up at once.
REQUESTS = 32
#: Positions of a plan for each run that there is room for: with more runs than that nothing is
#: merged, and every position is an entry.
RUN = 8
#: Runs a program looks at at once.
RUNS = 64

_NOT_SPECIALIZED = ["num_rows", "width", "num_slots", "capacity", "batch", "stride", "run_capacity"]


@triton.jit
def _look(rows, cached_at, position, length, num_slots):
    """Slots of some positions, which of them are kept, their cached positions, and whether these
    name the same slots (they are other positions of the row)."""
    slot = tl.load(rows + position, mask=(position >= 0) & (position < length), other=-1)
    kept = (slot >= 0) & (slot < num_slots)
    home = tl.load(cached_at + slot, mask=kept, other=-1)
    there = kept & (home >= 0) & (home < length) & (home != position)
    return slot, kept, home, there & (tl.load(rows + home, mask=there, other=-1) == slot)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def plan_kernel(
    rows,  # int32 [num_rows, width]
    requests,  # int32 or int64 [batch]
    lengths,  # likewise
    cached_at,  # int32 [num_slots], unused unless SHIFTS
    merges,  # int32 [1], whether runs are merged; this and the next two unused unless MERGE
    runs,  # int32 [3, run_capacity], written: first and last cached position, rotation
    run_indptr,  # int32 [batch + 1]
    counts,  # int32 [3, stride]: positions, entries, runs of [batch, PIECES]; written unless WRITE
    kv_indptr,  # int32 [batch + 1]
    kv_indices,  # int32 [capacity], written
    shift,  # int32 [capacity], written
    positions,  # int32 [capacity], written if POSITIONS
    num_rows, width, row_stride, num_slots, stride, run_capacity, capacity, SHIFTS: tl.constexpr,
    POSITIONS: tl.constexpr, MERGE: tl.constexpr, WRITE: tl.constexpr, PIECES: tl.constexpr,
    TILE: tl.constexpr,
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
    zeros = tl.zeros([TILE], tl.int32)
    found, found_entries, found_runs = zeros, zeros, zeros
    if WRITE:
        kind = 0
        if MERGE:
            kind = tl.load(merges)
            run_to = common.first_target(run_indptr, counts + 2 * stride, request, piece, PIECES)
        to = common.first_target(kv_indptr, counts + kind * stride, request, piece, PIECES)
    for some in range(start, stop, TILE):
        position = some + tl.arange(0, TILE)
        inside = position < stop
        if MERGE:
            slot, kept, home, alias = _look(rows, cached_at, position, length, num_slots)
            _slot, _kept, last, follows = _look(rows, cached_at, position - 1, length, num_slots)
            kept &= inside
            alias &= inside
            begins = alias & ((follows == 0) | (last + 1 != home))
        else:
            slot = tl.load(rows + position, mask=inside, other=-1)
            kept = (slot >= 0) & (slot < num_slots)
            alias = kept & (slot < 0)
            begins = alias
        if WRITE:
            if MERGE:
                merged = alias & (kind != 0)
                begins &= kind != 0
                run_at, run_fits, run_to = common.targets(begins, run_to, run_capacity)
                _slot, _kept, then, goes_on = _look(
                    rows, cached_at, position + 1, length, num_slots
                )
                ends = merged & ((goes_on == 0) | (then != home + 1))
                tl.store(runs + run_at, home, mask=run_fits)
                tl.store(runs + 2 * run_capacity + run_at, position - home, mask=run_fits)
                # That of a run which began before this tile is the last one before.
                run_at += begins.to(tl.int32) - 1
                ends &= (run_at >= 0) & (run_at < run_capacity)
                tl.store(runs + run_capacity + run_at, home, mask=ends)
                kept &= merged == 0
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
            found_entries += (kept & (alias == 0)).to(tl.int32)
            found_runs += begins.to(tl.int32)
    if not WRITE:
        at_count = counts + request * PIECES + piece
        tl.store(at_count, tl.sum(found, axis=0))
        if MERGE:
            tl.store(at_count + stride, tl.sum(found_entries, axis=0))
            tl.store(at_count + 2 * stride, tl.sum(found_runs, axis=0))


@triton.jit
def _scan(counts, indptr, batch, capacity, PIECES: tl.constexpr, REQUESTS: tl.constexpr):
    """``indptr`` of counts ``[batch, PIECES]``; returns their sum, which may exceed ``capacity``."""
    tl.store(indptr, 0)
    before = tl.zeros([], tl.int64)
    for some in range(0, batch, REQUESTS):
        request = some + tl.arange(0, REQUESTS)
        inside = request < batch
        at = request[:, None] * PIECES + tl.arange(0, PIECES)[None, :]
        count = tl.sum(tl.load(counts + at, mask=inside[:, None], other=0), axis=1).to(tl.int64)
        after = tl.minimum(before + tl.cumsum(count, axis=0), capacity)
        tl.store(indptr + 1 + request, after.to(tl.int32), mask=inside)
        before += tl.sum(count, axis=0)
    return before


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def scan_kernel(
    counts,  # int32 [batch, PIECES]; if MERGE as in plan_kernel
    kv_indptr,  # int32 [batch + 1], written
    merges,  # int32 [1], written if MERGE
    run_indptr,  # int32 [batch + 1], likewise
    batch, capacity, stride, run_capacity, MERGE: tl.constexpr, PIECES: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """Grid (1,)."""
    kind = 0
    if MERGE:
        runs = _scan(counts + 2 * stride, run_indptr, batch, run_capacity, PIECES, REQUESTS)
        kind = (runs <= run_capacity).to(tl.int32)
        tl.store(merges, kind)
    _scan(counts + kind * stride, kv_indptr, batch, capacity, PIECES, REQUESTS)


@triton.jit(do_not_specialize=["run_capacity", "capacity"])
def rotation_kernel(
    kv_indptr,  # int32 [batch + 1]
    positions,  # int32 [entries]
    merges, runs, run_indptr,  # as plan_kernel and scan_kernel left them
    counts,  # int32 [batch, PIECES], written unless WRITE
    indptr,  # int32 [batch + 1], rotations of each request
    tile_ptr,  # int32 [total // ENTRIES + batch + 1], written
    by,  # int32 [capacity], written
    bits,  # int64 [capacity], written
    run_capacity, capacity, WRITE: tl.constexpr, ENTRIES: tl.constexpr, RUNS: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Grid (PIECES, batch). Counts the rotations of every piece's tiles, or writes them."""
    piece = tl.program_id(0)
    request = tl.program_id(1)
    begin = tl.load(kv_indptr + request)
    entries = tl.load(kv_indptr + request + 1) - begin
    tiles = tl.cdiv(entries, ENTRIES)
    start, stop = common.piece_of(tiles, piece, PIECES, 1)
    first_run, last_run = tl.load(run_indptr + request), tl.load(run_indptr + request + 1)
    last_run = tl.where(tl.load(merges) != 0, last_run, first_run)
    tile_ptr += begin // ENTRIES + request
    found = tl.zeros([RUNS], tl.int32)
    if WRITE:
        to = common.first_target(indptr, counts, request, piece, PIECES)
        if piece == 0:
            # Behind the last tile; between two requests there may be one that is of neither.
            end = tl.load(indptr + request + 1)
            tl.store(tile_ptr + tiles, end)
            tl.store(tile_ptr + (begin % ENTRIES + entries) // ENTRIES + 1, end)
    bit = tl.arange(0, ENTRIES)
    for tile in range(start, stop):
        inside = tile * ENTRIES + bit < entries
        position = tl.load(positions + begin + tile * ENTRIES + bit, mask=inside, other=-1)
        least, most = tl.load(positions + begin + tile * ENTRIES), tl.max(position, axis=0)
        if WRITE:
            tl.store(tile_ptr + tile, to.to(tl.int32))
        for some in range(first_run, last_run, RUNS):
            run = some + tl.arange(0, RUNS)
            first = tl.load(runs + run, mask=run < last_run, other=most + 1)
            last = tl.load(runs + run_capacity + run, mask=run < last_run, other=-1)
            hit = (first <= most) & (last >= least)
            found += hit.to(tl.int32)
            if WRITE:
                at, fits, to = common.targets(hit, to, capacity)
                if tl.max(fits.to(tl.int32), axis=0) > 0:
                    on = (position[None, :] >= first[:, None]) & (
                        position[None, :] <= last[:, None]
                    )
                    word = tl.sum(on.to(tl.int64) << bit[None, :].to(tl.int64), axis=1)
                    rotation = tl.load(runs + 2 * run_capacity + run, mask=fits, other=0)
                    tl.store(by + at, rotation, mask=fits)
                    tl.store(bits + at, word, mask=fits)
    if not WRITE:
        tl.store(counts + request * PIECES + piece, tl.sum(found, axis=0))


class MergeBuffers(NamedTuple):
    """Memory for the rotations of plans; all but the first of the kernels' own use."""

    rotations: Rotations  # over the whole capacity
    indptr: torch.Tensor  # int32 [batch + 1], of the rotations
    merges: torch.Tensor  # int32 [1]
    runs: torch.Tensor  # int32 [3, run_capacity]
    run_indptr: torch.Tensor  # int32 [batch + 1]
    counts: torch.Tensor  # int32 [3, batch, PIECES]


@dataclasses.dataclass(frozen=True)
class PlanBuffers:
    """Memory for plans of up to ``batch`` requests and ``capacity`` entries, step after step."""

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [capacity]; anything beyond the last entry
    shift: torch.Tensor  # int32 [capacity], likewise
    counts: torch.Tensor  # int32 [batch, PIECES], of the kernels' own use
    #: int32 ``[capacity]``, of the entries in their rows; None where nobody asks.
    positions: torch.Tensor | None = None
    merge: MergeBuffers | None = None  # None: every position is an entry

    @classmethod
    def of(
        cls,
        batch: int,
        capacity: int,
        device: torch.device | str,
        *,
        positions: bool = False,
        merge: bool = False,
    ) -> PlanBuffers:
        # Zeros are an empty plan.
        made = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        counts, merged = made((3 if merge else 1, batch, PIECES)), None
        if merge:
            runs, tiles = capacity // RUN, capacity // ENTRIES
            most = 2 * runs + tiles
            bits = torch.zeros(most, dtype=torch.int64, device=device)
            rotations = Rotations(made(tiles + batch + 1), made(most), bits)
            own = made(batch + 1), made(1), made((3, runs)), made(batch + 1)
            merged = MergeBuffers(rotations, *own, counts)
        sides = made(batch + 1), made(capacity), made(capacity), counts[0]
        return cls(*sides, made(capacity) if positions or merge else None, merged)

    @property
    def batch(self) -> int:
        """Most requests of a plan."""
        return len(self.counts)

    def plan_of(self, batch: int) -> RowPlan:
        """What was planned for ``batch`` requests, over the whole capacity."""
        rotations = None
        if self.merge is not None:
            tile_ptr, by, bits = self.merge.rotations
            tiles = len(self.kv_indices) // ENTRIES + batch
            rotations = Rotations(tile_ptr[: tiles + 1], by, bits)
        return RowPlan(self.kv_indptr[: batch + 1], self.kv_indices, self.shift, rotations)

    def fill(self, kernel: Any, batch: int, *sizes: Any, read: Any, **fixed: Any) -> None:
        """Launch ``kernel`` twice: it counts entries, of which ``kv_indptr`` is made, and writes."""
        positions = self.counts if self.positions is None else self.positions
        written = self.kv_indptr, self.kv_indices, self.shift, positions
        capacity = len(self.kv_indices)
        merge = self.merge if fixed.get("MERGE") else None
        arguments = *read, self.counts, *written, *sizes, capacity
        self._launch(kernel, batch, arguments, self.kv_indptr, capacity, merge, **fixed)

    def rotate(self, batch: int) -> None:
        """Cut the runs of a plan by its tiles."""
        merge = self.merge
        assert merge is not None and self.positions is not None
        read = self.kv_indptr, self.positions, merge.merges, merge.runs, merge.run_indptr
        capacity = len(merge.rotations.by)
        sizes = merge.runs.shape[1], capacity
        arguments = *read, self.counts, merge.indptr, *merge.rotations, *sizes
        fixed = dict(ENTRIES=ENTRIES, RUNS=RUNS)
        self._launch(rotation_kernel, batch, arguments, merge.indptr, capacity, None, **fixed)

    def _launch(
        self,
        kernel: Any,
        batch: int,
        arguments: tuple[Any, ...],
        indptr: torch.Tensor,
        capacity: int,
        merge: MergeBuffers | None,
        **fixed: Any,
    ) -> None:
        pieces, counts = self.counts.shape[1], self.counts
        scanned = counts, indptr, counts, counts, batch, capacity, 0, 0
        if merge is not None:
            sizes = counts.numel(), merge.runs.shape[1]
            scanned = counts, indptr, merge.merges, merge.run_indptr, batch, capacity, *sizes
        scan = dict(MERGE=merge is not None, PIECES=pieces, REQUESTS=REQUESTS)
        with common.current_device(counts.device):
            for write in (False, True):
                if write:
                    scan_kernel[(1,)](*scanned, **scan)
                if batch:
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
    ``cached_at`` all shifts are 0. Buffers made with ``merge`` have rotations, unless there are
    more runs of them than one for every :data:`RUN` positions of the capacity.

    Raises:
        ValueError: more requests than the buffers are for.
    """
    batch = len(requests)
    if batch > buffers.batch:
        raise ValueError(f"plan: {batch} requests, the buffers are for {buffers.batch}")
    if rows.stride(1) != 1:
        raise ValueError(f"plan: positions of a row must lie side by side, got {rows.stride()}")
    tensors = rows, requests.contiguous(), lengths.contiguous()
    unused, merge = buffers.counts, None if cached_at is None else buffers.merge
    own = (unused,) * 3 if merge is None else (merge.merges, merge.runs, merge.run_indptr)
    sizes = buffers.counts.numel(), 0 if merge is None else merge.runs.shape[1]
    buffers.fill(
        plan_kernel,
        batch,
        *(*rows.shape, rows.stride(0), num_slots, *sizes),
        read=(*tensors, unused if cached_at is None else cached_at.contiguous(), *own),
        SHIFTS=cached_at is not None,
        POSITIONS=buffers.positions is not None,
        MERGE=merge is not None,
        TILE=TILE,
    )
    if merge is not None:
        buffers.rotate(batch)
    return buffers.plan_of(batch)
