# SPDX-License-Identifier: Apache-2.0
"""Plans which slots each request of a forward reads: ``kv_indptr`` and ``kv_indices`` as in FlashInfer."""

import ctypes
import functools
from typing import NamedTuple

import torch

from sglang_reasoncache import native
from sglang_reasoncache.native.pool import call

#: Number of entries in a tile. The entries share a list of rotations; each rotation has one bit per entry.
TILE = 64


class Rotations(NamedTuple):
    """How a merged :class:`RowPlan` rotates keys. A tile is ``TILE`` consecutive entries of a request.
    It has a list of rotations if one of its keys is used at a position other than the key's cached position.

    Tile t of request b has the number ``kv_indptr[b] // TILE + b + t``. A tile without a list uses each key
    once, as cached. A list begins with the rotation by 0, whose bits mark the keys that are used as cached.
    Other rotations follow in any order. In a tile of fewer than ``TILE`` entries the last bits mean nothing."""

    tile_ptr: torch.Tensor  # int32 [total // TILE + batch + 1]: where each tile's list begins
    by: torch.Tensor  # int32 [count], lists of all tiles: by how many positions keys are rotated
    bits: torch.Tensor  # int64 [count]; bit i: entry i of the tile is used with this rotation


class RowPlan(NamedTuple):
    """Which slots the queries of a forward read. Layers share a plan; window layers may have their own.

    The entries of request b are ``kv_indptr[b]`` to ``kv_indptr[b + 1]``, in the order of their positions. An
    entry is the slot of one token, whatever the page size. A slot's *cached position* is the position for which
    its key was rotated. If a row names a slot at its cached position and at others, a *merged* plan has one
    entry for all these positions. Merged plans have ``rotations`` in place of ``shift``."""

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [total], slots
    #: int32 ``[total]``, by how many positions to rotate each key: the position where it is used, minus its
    #: cached position. None in merged plans. ``plan_rows`` also makes it None if all shifts are 0.
    shift: torch.Tensor | None
    rotations: Rotations | None = None  # None: every key is used once, rotated by its ``shift``


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
    requests, lengths = requests.long().contiguous(), lengths.long().contiguous()
    merge = merge and cached_at is not None
    read = lengths.clamp(max=reach) if reach else lengths
    capacity, made = max(0, int(read.sum())), functools.partial(torch.empty, dtype=torch.int32)
    kv_indptr, kv_indices = made(len(requests) + 1), made(capacity)
    shift = None if cached_at is None else made(capacity)
    tile_ptr = by = bits = None
    if merge:
        tiles = capacity // TILE + len(requests)
        tile_ptr, by = made(tiles + 1), made(capacity + tiles)
        bits = torch.empty(capacity + tiles, dtype=torch.int64)
    is_shifted, count = ctypes.c_int32(), ctypes.c_int32()
    table = rows, len(rows), rows.stride(0), rows.shape[1]
    batch = requests, lengths, len(requests), reach, cached_at, num_slots
    outputs = kv_indptr, kv_indices, shift, capacity, tile_ptr, by, bits
    call(
        native.library(), "plan", *table, *batch, *outputs, *map(ctypes.byref, (is_shifted, count))
    )
    total = int(kv_indptr[-1])
    if shift is not None:
        shift = shift[:total] if is_shifted.value else None
    rotations = None
    if count.value and tile_ptr is not None and by is not None and bits is not None:
        tiles = total // TILE + len(requests)
        rotations = Rotations(tile_ptr[: tiles + 1], by[: count.value], bits[: count.value])
    return RowPlan(kv_indptr, kv_indices[:total], shift, rotations)
