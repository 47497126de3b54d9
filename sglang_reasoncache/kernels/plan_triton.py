# SPDX-License-Identifier: Apache-2.0
"""The row planner on a GPU: no wait for the device, so it can run inside a CUDA graph.

Three launches whose grids depend on the batch alone. Each row is cut into
``PIECES``; the first counts the entries of every piece, the second makes
``kv_indptr`` of the counts, the third writes the entries.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.rotate_triton import current_device
from sglang_reasoncache.kernels.row_order import RowOrder

#: Programs of a row.
PIECES = 16
#: Positions a program reads at once.
TILE = 512
#: Requests the second launch adds up at once.
REQUESTS = 32
NUM_WARPS = 4

_NOT_SPECIALIZED = ["num_rows", "width", "window", "num_slots", "capacity", "batch"]


@triton.jit
def _row_of(requests, lengths, request, num_rows, width, window):
    """Row, first position wanted and number of positions; none where it cannot be read."""
    row = tl.load(requests + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int64)
    sound = (row >= 0) & (row < num_rows) & (length > 0)
    length = tl.where(sound, tl.minimum(length, width), 0).to(tl.int32)
    return tl.where(sound, row, 0), tl.maximum(length - window, 0), length


@triton.jit
def _piece_of(
    first, length, piece, ORDERED: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr
):
    """Where in its row a program starts and stops."""
    if ORDERED:  # any place may hold one of the newest positions
        first = 0
    size = tl.cdiv(tl.cdiv(length - first, PIECES), TILE) * TILE
    start = tl.minimum(first + piece * size, length)
    return start, tl.minimum(start + size, length)


@triton.jit
def _entries(
    rows, row_stride, order, order_stride, sorted_count, row, place, first, length, stop, num_slots,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Slots and positions at some places of a row, and which of them are entries."""
    inside = place < stop
    position = place
    if ORDERED:
        # Sorted for a longer row, it is not an order of this one.
        known = inside & (place < sorted_count) & (sorted_count <= length)
        at = order + row * order_stride + place
        position = tl.where(known, tl.load(at, mask=known, other=0), place)
        inside &= (position >= first) & (position < length)
    slot = tl.load(rows + row * row_stride + position, mask=inside, other=-1)
    return slot, position, inside & (slot >= 0) & (slot < num_slots)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def count_kernel(
    rows,  # int32 [num_rows, width]
    requests,  # int32 or int64 [batch]
    lengths,  # likewise
    order,  # int32 [num_rows, width], unused unless ORDERED
    sorted_counts,  # int32 [num_rows], likewise
    counts,  # int32 [batch, PIECES], written
    num_rows,
    width,
    window,
    num_slots,
    row_stride,
    order_stride,
    ORDERED: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (PIECES, batch)."""
    piece = tl.program_id(0)
    request = tl.program_id(1)
    row, first, length = _row_of(requests, lengths, request, num_rows, width, window)
    sorted_count = tl.load(sorted_counts + row) if ORDERED else 0
    start, stop = _piece_of(first, length, piece, ORDERED, PIECES, TILE)
    found = tl.zeros([TILE], tl.int32)
    for place in range(start, stop, TILE):
        _, _, kept = _entries(
            rows, row_stride, order, order_stride, sorted_count, row,
            place + tl.arange(0, TILE), first, length, stop, num_slots, ORDERED,
        )  # fmt: skip
        found += kept.to(tl.int32)
    tl.store(counts + request * PIECES + piece, tl.sum(found, axis=0))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def scan_kernel(
    counts,  # int32 [batch, PIECES]
    kv_indptr,  # int32 [batch + 1], written
    shifted,  # int32 [batch], zeroed
    batch,
    capacity,
    PIECES: tl.constexpr,
    REQUESTS: tl.constexpr,
):
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
        tl.store(shifted + request, tl.zeros([REQUESTS], tl.int32), mask=inside)
        before += tl.sum(count, axis=0)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def write_kernel(
    rows,
    requests,
    lengths,
    order,
    sorted_counts,
    cached_at,  # int32 [num_slots], unused unless HOME
    counts,  # int32 [batch, PIECES]
    kv_indptr,  # int32 [batch + 1]
    kv_indices,  # int32 [capacity], written
    shift,  # int32 [capacity], written
    shifted,  # int32 [batch], 1 written where a shift is not 0
    positions,  # int32 [capacity], written if POSITIONS
    num_rows,
    width,
    window,
    num_slots,
    capacity,
    row_stride,
    order_stride,
    HOME: tl.constexpr,
    POSITIONS: tl.constexpr,
    ORDERED: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (PIECES, batch)."""
    piece = tl.program_id(0)
    request = tl.program_id(1)
    row, first, length = _row_of(requests, lengths, request, num_rows, width, window)
    sorted_count = tl.load(sorted_counts + row) if ORDERED else 0
    start, stop = _piece_of(first, length, piece, ORDERED, PIECES, TILE)
    pieces = tl.arange(0, PIECES)
    earlier = tl.load(counts + request * PIECES + pieces, mask=pieces < piece, other=0)
    to = tl.load(kv_indptr + request).to(tl.int64) + tl.sum(earlier, axis=0)
    away = tl.zeros([TILE], tl.int32)
    for place in range(start, stop, TILE):
        slot, position, kept = _entries(
            rows, row_stride, order, order_stride, sorted_count, row,
            place + tl.arange(0, TILE), first, length, stop, num_slots, ORDERED,
        )  # fmt: skip
        one = kept.to(tl.int32)
        at = to + tl.cumsum(one, axis=0) - one
        room = kept & (at < capacity)
        tl.store(kv_indices + at, slot, mask=room)
        if POSITIONS:
            tl.store(positions + at, position, mask=room)
        by = tl.zeros([TILE], tl.int32)
        if HOME:
            by = position - tl.load(cached_at + slot, mask=room, other=0)
            away |= (room & (by != 0)).to(tl.int32)
        tl.store(shift + at, by, mask=room)
        to += tl.sum(one, axis=0)
    if tl.max(away, axis=0) > 0:
        tl.store(shifted + request, 1)


@dataclasses.dataclass(frozen=True)
class PlanBuffers:
    """Where plans of up to ``batch`` requests and ``capacity`` entries go, step after step.

    Attributes:
        kv_indptr: int32 ``[batch + 1]``.
        kv_indices: int32 ``[capacity]``; beyond the last entry anything.
        shift: int32 ``[capacity]``, likewise.
        moved: int32 ``[batch]``, 1 where an entry of the request has a shift other than 0.
        counts: int32 ``[batch, PIECES]``, of the kernels' own use.
        positions: int32 ``[capacity]``, of the entries in their rows; None where nobody asks.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    shift: torch.Tensor
    shifted: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor | None = None

    @classmethod
    def of(
        cls, batch: int, capacity: int, device: torch.device | str, *, positions: bool = False
    ) -> PlanBuffers:
        def made(*shape: int) -> torch.Tensor:
            # Valid from the start: an empty plan.
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            made(batch + 1),
            made(capacity),
            made(capacity),
            made(batch),
            made(batch, PIECES),
            made(capacity) if positions else None,
        )

    def plan_of(self, batch: int) -> RowPlan:
        """What was planned for ``batch`` requests, over the whole capacity."""
        return RowPlan(self.kv_indptr[: batch + 1], self.kv_indices, self.shift)


def plan_into(
    buffers: PlanBuffers,
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None = None,
    *,
    num_slots: int,
    window: int | None = None,
    order: RowOrder | None = None,
) -> RowPlan:
    """Flatten the rows of a batch into ``buffers``, without a wait.

    Nothing is looked at by the host, so nothing is refused for its value, and nothing
    is read out of bounds: a request that is not a row has no entries, a length
    beyond the row is cut to it, an entry that is no slot is dropped, and so is
    what goes beyond the capacity. Without ``cached_at`` all shifts are 0.

    Args:
        rows, requests, lengths, home, num_slots, window: See
            :func:`sglang_reasoncache.kernels.plan.plan_rows`; int32 and int64 alike.
        order: The order of each row's entries; None: by position.

    Returns:
        ``buffers.plan_of(batch)``.

    Raises:
        ValueError: more requests than the buffers are for, or an order of other rows.
    """
    where = _Rows(rows, requests, lengths, num_slots, window, order)
    batch, most = requests.shape[0], buffers.shifted.shape[0]
    if batch > most:
        raise ValueError(f"plan: {batch} requests, the buffers are for {most}")
    where.count(buffers.counts, buffers.kv_indptr, buffers.shifted, buffers.kv_indices.shape[0])
    where.write(buffers, cached_at)
    return buffers.plan_of(batch)


def plan_rows(
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None,
    num_slots: int,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As :func:`plan_into`, into tensors of the right size, for which it waits twice."""
    where = _Rows(rows, requests, lengths, num_slots, window, None)
    buffers = PlanBuffers.of(requests.shape[0], 0, rows.device)
    where.count(buffers.counts, buffers.kv_indptr, buffers.shifted, 2**31 - 1)
    kv_indices, shift = rows.new_empty((2, int(buffers.kv_indptr[-1]))).unbind()
    buffers = dataclasses.replace(buffers, kv_indices=kv_indices, shift=shift)
    where.write(buffers, cached_at)
    shifted = cached_at is not None and bool(buffers.shifted.any())
    return buffers.kv_indptr, kv_indices, shift if shifted else None


class _Rows:
    """The rows of a batch, as both kernels that read them take them."""

    def __init__(
        self,
        rows: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        num_slots: int,
        window: int | None,
        order: RowOrder | None,
    ) -> None:
        if rows.stride(1) != 1:
            raise ValueError(f"plan: positions of a row must lie side by side, got {rows.stride()}")
        if order is not None and order.positions.shape != rows.shape:
            raise ValueError(
                f"plan: an order of rows {list(order.positions.shape)}, rows are {list(rows.shape)}"
            )
        num_rows, width = rows.shape
        tables = (rows, requests) if order is None else (order.positions, order.counts)
        self._device = rows.device
        self._batch = requests.shape[0]
        self._tensors = (rows, requests.contiguous(), lengths.contiguous(), *tables)
        self._sizes = (num_rows, width, width if window is None else window, num_slots)
        self._strides = (rows.stride(0), tables[0].stride(0))
        self._fixed = dict(ORDERED=order is not None, PIECES=PIECES, TILE=TILE, num_warps=NUM_WARPS)

    def count(
        self, counts: torch.Tensor, kv_indptr: torch.Tensor, shifted: torch.Tensor, capacity: int
    ) -> None:
        with current_device(self._device):
            if self._batch:
                count_kernel[(PIECES, self._batch)](
                    *self._tensors, counts, *self._sizes, *self._strides, **self._fixed
                )
            scan_kernel[(1,)](
                counts,
                kv_indptr,
                shifted,
                self._batch,
                capacity,
                PIECES=PIECES,
                REQUESTS=REQUESTS,
                num_warps=NUM_WARPS,
            )

    def write(self, buffers: PlanBuffers, cached_at: torch.Tensor | None) -> None:
        if not self._batch:
            return
        with current_device(self._device):
            write_kernel[(PIECES, self._batch)](
                *self._tensors,
                buffers.counts if cached_at is None else cached_at.contiguous(),
                buffers.counts,
                buffers.kv_indptr,
                buffers.kv_indices,
                buffers.shift,
                buffers.shifted,
                buffers.counts if buffers.positions is None else buffers.positions,
                *self._sizes,
                buffers.kv_indices.shape[0],
                *self._strides,
                HOME=cached_at is not None,
                POSITIONS=buffers.positions is not None,
                **self._fixed,
            )
