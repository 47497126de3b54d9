# SPDX-License-Identifier: Apache-2.0
"""The plan of a batch's rows, made once per forward: ``kv_indptr`` and ``kv_indices`` as in FlashInfer."""

import ctypes
import functools
from typing import NamedTuple

import torch

from sglang_reasoncache import native
from sglang_reasoncache.native.pool import call

#: Number of entries of a request that share a list of rotations; a rotation has a bit for each entry.
TILE = 64


class Rotations(NamedTuple):
    """A list of rotations for each tile (``TILE`` entries) that uses a key at a position it was not cached for.

    Tile t of request b has the number ``kv_indptr[b] // TILE + b + t``. A tile without a list uses each key
    once, as cached. A list begins with the rotation by 0, whose bits are the keys that are used as cached. The
    other rotations follow in any order. Bits beyond the entries of a tile mean nothing.
    """

    tile_ptr: torch.Tensor  # int32 [total // TILE + batch + 1]: where each tile's list begins
    by: torch.Tensor  # int32 [count]: by how many positions keys are rotated
    bits: torch.Tensor  # int64 [count]; bit i: entry i of the tile is used with this rotation


class RowPlan(NamedTuple):
    """Which slots the queries of a forward read. Layers share a plan; those with windows may have their own.

    Entries of request b are ``kv_indptr[b]`` to ``kv_indptr[b + 1]``, in the order of their positions. An entry
    is a single token, whatever the page size. A slot's *cached position* is the one that its key was rotated
    for. If a row names a slot at its cached position and at others, a merged plan has no entries for the
    others. Merged plans have ``rotations`` in place of ``shift``."""

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [total], slots
    #: int32 ``[total]``, positions by which to rotate each key (where it is used minus where it
    #: was cached); None if all are 0, or if ``rotations`` has them.
    shift: torch.Tensor | None
    rotations: Rotations | None = None  # None if every key is used once, as ``shift`` says


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
    """Flatten the rows of a batch in host memory, in C++. On a GPU, ``plan_triton.plan_into`` does this.

    Args:
        rows: int32 ``[num_rows, width]`` (``req_to_token``), the slot of each position. A value below 0 means
            that the position was evicted: no entry is made, and later positions keep their numbers.
        requests: int ``[batch]``, index of each request's row.
        lengths: int ``[batch]``, positions in use, at most ``width``.
        cached_at: int32 ``[num_slots]``, the position for which each slot's key was rotated. None: no shifts.
        num_slots: Slots of the pool, the bound of every entry.
        reach: How many of each row's newest positions are read; 0 reads all.
        merge: Whether to merge entries (see :class:`RowPlan`): a slot that a row names at its cached position
            is then read once for all positions. Without ``cached_at`` nothing is merged.

    Raises:
        ValueError: tensors of wrong dtype or shape; a request, length or slot out of range.
        sglang_reasoncache.native.NativeUnavailable: the library cannot be compiled.
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
