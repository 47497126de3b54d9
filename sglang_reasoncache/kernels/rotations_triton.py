# SPDX-License-Identifier: Apache-2.0
"""Makes rotation lists (``Rotations``) of a merged ``RowPlan`` on a GPU, from runs that ``plan_triton`` found.

A run is a stretch of positions whose keys are rotated by the same number of positions. A run adds a rotation
to every tile of ``ENTRIES`` plan entries that holds keys of the run. First, many programs per request count
each tile's rotations in parallel, and a ``cumsum`` of the counts gives the place of each list. Then one program
per request writes the rotations of run after run, so lists have a fixed order. No part of this takes time
proportional to the number of tiles times the number of runs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels import common_triton as common
from sglang_reasoncache.kernels.row_plan import TILE as ENTRIES
from sglang_reasoncache.kernels.row_plan import Rotations

#: Number of programs that count a request's rotations.
PIECES = 16
#: Number of runs (or tiles) that a program handles at once.
RUNS = 64


@triton.jit
def _used_by(
    rows,
    cached_at,
    positions,
    first,
    last,
    inside,
    length,
    begin,
    num_slots,
    entries,
):
    """Returns, for runs of positions ``first`` to ``last``: the first and last entry that a run uses, by how
    many positions their keys are rotated, the run's kind, and whether the run uses any entries."""
    _slot, home, kind = common.look(rows, cached_at, first, length, begin, num_slots)
    wanted = tl.where(kind == common.ALIAS, home, first)
    # Binary search: entries are in the order of their positions.
    at = tl.zeros_like(first)
    size = entries
    while size > 1:
        half = size // 2
        at = tl.where(tl.load(positions + at + half) <= wanted, at + half, at)
        size -= half
    present = tl.load(positions + at, mask=inside & (entries > 0), other=-1) == wanted
    return at, tl.minimum(at + last - first, entries - 1), first - home, kind, inside & present


@triton.jit(
    do_not_specialize=["num_rows", "width", "reach", "num_slots", "run_capacity", "capacity"]
)
def rotation_kernel(
    # as plan_kernel reads them
    rows,
    requests,
    lengths,
    cached_at,
    kv_indptr,  # int32 [batch + 1]
    positions,  # int32 [run_capacity]: positions of the entries
    runs,  # int32 [2, run_capacity]: first and last position of each run
    run_indptr,  # int32 [batch + 1]
    tile_ptr,  # int32 [total // ENTRIES + batch + 1], unused unless WRITE
    following,  # int32, shape of tile_ptr: a tile's rotation count; if WRITE, place of its next one
    by,  # int32 [capacity], written if WRITE
    bits,  # int64 [capacity], written if WRITE
    num_rows,
    width,
    row_stride,
    reach,
    num_slots,
    run_capacity,
    capacity,
    WRITE: tl.constexpr,
    ENTRIES: tl.constexpr,
    RUNS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """Grid (PIECES, batch). Counts the rotations of every tile, or writes them if WRITE (PIECES is then 1)."""
    request = tl.program_id(1)
    rows, length, from_ = common.row_of(
        rows, requests, lengths, request, num_rows, width, row_stride, reach
    )
    begin = tl.load(kv_indptr + request)
    entries = tl.load(kv_indptr + request + 1) - begin
    positions += begin
    tile_ptr += begin // ENTRIES + request
    following += begin // ENTRIES + request
    first_run = tl.load(run_indptr + request)
    count = tl.load(run_indptr + request + 1) - first_run
    start, stop = common.piece_of(count, tl.program_id(0), PIECES, RUNS)
    lane = tl.arange(0, RUNS)
    if WRITE:  # A list begins with the rotation by 0, all bits set; runs clear some of them below.
        for some in range(0, tl.cdiv(entries, ENTRIES), RUNS):
            tile = some + lane
            list_start = tl.load(tile_ptr + tile, mask=tile * ENTRIES < entries, other=capacity)
            listed = tl.load(tile_ptr + tile + 1, mask=list_start < capacity, other=0) > list_start
            tl.store(by + list_start, tl.zeros([RUNS], tl.int32), mask=listed)
            tl.store(bits + list_start, tl.full([RUNS], -1, tl.int64), mask=listed)
        tl.debug_barrier()
    for some in range(start, stop, RUNS):
        inside = some + lane < stop
        run = runs + first_run + some + lane
        first = tl.load(run, mask=inside, other=0)
        last = tl.load(run + run_capacity, mask=inside, other=0)
        at, end, turn, kind, ok = _used_by(
            rows, cached_at, positions, first, last, inside, length, from_, num_slots, entries
        )
        least = at // ENTRIES
        most = tl.where(ok, end // ENTRIES, -1)
        for step in range(0, tl.max(most - least, axis=0) + 1):
            tile = least + step
            on = tile <= most
            if not WRITE:
                had = tl.atomic_add(following + tile, 1, mask=on)
                # The first rotation of a tile adds 2 to the count, because the list also has the rotation by 0.
                tl.atomic_add(following + tile, 1, mask=on & (had == 0))
            else:
                low = tl.maximum(at - tile * ENTRIES, 0).to(tl.int64)
                high = tl.minimum(end - tile * ENTRIES, ENTRIES - 1).to(tl.int64)
                unit = tl.full([RUNS], 1, tl.int64)
                word = (((unit << (high - low)) - 1) * 2 + 1) << low
                same = on[None, :] & (tile[:, None] == tile[None, :])
                before = tl.sum((same & (lane[None, :] < lane[:, None])).to(tl.int32), axis=1)
                behind = tl.sum((same & (lane[None, :] > lane[:, None])).to(tl.int32), axis=1)
                to = tl.load(following + tile, mask=on, other=0) + before
                fits = on & (to < capacity)
                tl.store(by + to, turn, mask=fits)
                tl.store(bits + to, word, mask=fits)
                list_start = tl.load(tile_ptr + tile, mask=fits, other=0)
                tl.atomic_and(bits + list_start, ~word, mask=fits & (kind == common.SHIFTED))
                tl.debug_barrier()
                tl.store(following + tile, to + 1, mask=on & (behind == 0))
                tl.debug_barrier()


class MergeBuffers(NamedTuple):
    """Memory for the rotations of plans. Only the kernels use the fields after ``rotations``."""

    rotations: Rotations  # over the whole capacity
    following: torch.Tensor  # int32, of the size of tile_ptr
    positions: torch.Tensor  # int32 [capacity]: positions of the entries in their rows
    runs: torch.Tensor  # int32 [2, capacity]
    run_indptr: torch.Tensor  # int32 [batch + 1]

    @classmethod
    def of(cls, batch: int, capacity: int, device: torch.device | str) -> MergeBuffers:
        made = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        tiles = capacity // ENTRIES + batch
        # Each position adds at most one rotation, and each tile one more: the rotation by 0.
        most = capacity + tiles
        bits = torch.zeros(most, dtype=torch.int64, device=device)
        return cls(
            rotations=Rotations(made(tiles + 1), made(most), bits),
            following=made(tiles + 1),
            positions=made(capacity),
            runs=made(2, capacity),
            run_indptr=made(batch + 1),
        )

    def buffers(self) -> list[torch.Tensor]:
        """All tensors."""
        return [*self.rotations, self.following, self.positions, self.runs, self.run_indptr]


class RowReads(NamedTuple):
    """What the kernels that plan read of the rows. Fields are those of ``plan_triton.plan_into``."""

    rows: torch.Tensor
    requests: torch.Tensor
    lengths: torch.Tensor
    cached_at: torch.Tensor
    reach: int
    num_slots: int

    def arguments(self) -> dict[str, Any]:
        """The arguments of the kernels, by name."""
        return dict(
            rows=self.rows,
            requests=self.requests,
            lengths=self.lengths,
            cached_at=self.cached_at,
            num_rows=self.rows.shape[0],
            width=self.rows.shape[1],
            row_stride=self.rows.stride(0),
            reach=self.reach,
            num_slots=self.num_slots,
        )


def rotate(merge: MergeBuffers, batch: int, read: RowReads, kv_indptr: torch.Tensor) -> None:
    """Write the rotations of a plan whose entries and runs are already written. Waits for nothing."""
    _, by, bits = merge.rotations
    # The buffers may be made for larger batches.
    tiles = batch * read.rows.shape[1] // ENTRIES + batch + 1
    tile_ptr = merge.rotations.tile_ptr[:tiles]
    following = merge.following[:tiles]
    following.zero_()
    arguments = dict(
        **read.arguments(),
        kv_indptr=kv_indptr,
        positions=merge.positions,
        runs=merge.runs,
        run_indptr=merge.run_indptr,
        tile_ptr=tile_ptr,
        following=following,
        by=by,
        bits=bits,
        run_capacity=merge.runs.shape[1],
        capacity=len(by),
        ENTRIES=ENTRIES,
        RUNS=RUNS,
    )
    with common.current_device(by.device):
        rotation_kernel[(PIECES, batch)](WRITE=False, PIECES=PIECES, **arguments)
        tile_ptr[1:] = following[:-1].cumsum(0)
        torch.add(tile_ptr, 1, out=following)
        rotation_kernel[(1, batch)](WRITE=True, PIECES=1, **arguments)
