# SPDX-License-Identifier: Apache-2.0
"""Plans which slots each request of a forward reads, from rows in host memory."""

import ctypes

import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels.row_plan import TILE, Rotations, RowPlan
from sglang_reasoncache.native.pool import call


def plan_rows(
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None = None,
    *,
    num_slots: int,
    reach: int = 0,
    merge: bool = False,
) -> RowPlan:
    """Plan a batch whose rows are in host memory, in C++. For rows on a GPU use ``plan_triton.plan_into``.

    Args:
        rows: int32 ``[num_rows, width]`` (``req_to_token``), the slot of each position. A value below 0 means
            that the position was evicted: no entry is made, and later positions keep their numbers.
        requests: int ``[batch]``, index of each request's row.
        lengths: int ``[batch]``, positions in use, at most ``width``.
        cached_at: int32 ``[num_slots]``, the position for which each slot's key was rotated. None: no shifts.
        num_slots: Number of slots in the pool. Every slot in a row must be below this number.
        reach: How many of each row's newest positions are read; 0 reads all.
        merge: Whether to merge entries (see :class:`RowPlan`): a slot that a row names at its cached position
            is then read once for all positions. Without ``cached_at`` nothing is merged.

    Raises:
        ValueError: tensors of wrong dtype or shape; a request, length or slot out of range.
        sglang_reasoncache.native.NativeUnavailable: the C++ kernels cannot be compiled.
    """
    if rows.dtype != torch.int32 or rows.dim() != 2:
        raise ValueError(
            f"rows must be int32 [num_rows, width], got {rows.dtype} {list(rows.shape)}"
        )
    if requests.dim() != 1 or lengths.shape != requests.shape:
        raise ValueError(
            f"requests and lengths must be [batch], got {list(requests.shape)}, {list(lengths.shape)}"
        )
    if cached_at is not None:
        if cached_at.dtype != torch.int32 or cached_at.shape != (num_slots,):
            raise ValueError(
                f"cached_at must be int32 [{num_slots}], "
                f"got {cached_at.dtype} {list(cached_at.shape)}"
            )
        cached_at = cached_at.contiguous()
    requests = requests.long().contiguous()
    lengths = lengths.long().contiguous()
    merge = merge and cached_at is not None
    read = lengths.clamp(max=reach) if reach else lengths
    capacity = max(0, int(read.sum()))
    kv_indptr = torch.empty(len(requests) + 1, dtype=torch.int32)
    kv_indices = torch.empty(capacity, dtype=torch.int32)
    shift = None if cached_at is None else torch.empty(capacity, dtype=torch.int32)
    tile_ptr = None
    by = None
    bits = None
    if merge:
        tiles = capacity // TILE + len(requests)
        tile_ptr = torch.empty(tiles + 1, dtype=torch.int32)
        by = torch.empty(capacity + tiles, dtype=torch.int32)
        bits = torch.empty(capacity + tiles, dtype=torch.int64)
    is_shifted = ctypes.c_int32()
    count = ctypes.c_int32()
    call(
        native.library(),
        "plan",
        rows,
        len(rows),
        rows.stride(0),
        rows.shape[1],
        requests,
        lengths,
        len(requests),
        reach,
        cached_at,
        num_slots,
        kv_indptr,
        kv_indices,
        shift,
        capacity,
        tile_ptr,
        by,
        bits,
        ctypes.byref(is_shifted),
        ctypes.byref(count),
    )
    total = int(kv_indptr[-1])
    if shift is not None:
        shift = shift[:total] if is_shifted.value else None
    rotations = None
    if count.value and tile_ptr is not None and by is not None and bits is not None:
        tiles = total // TILE + len(requests)
        rotations = Rotations(tile_ptr[: tiles + 1], by[: count.value], bits[: count.value])
    return RowPlan(kv_indptr, kv_indices[:total], shift, rotations)
