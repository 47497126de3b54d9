# SPDX-License-Identifier: Apache-2.0
"""What the queries of a forward read: the plan of a batch's rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

#: Entries of a request that share a list of rotations, a bit for each.
TILE = 64


class Rotations(NamedTuple):
    """Positions that name the slot of an entry without being one: the entry's key is also used
    rotated ``by`` so many positions. Tile t of request b is number ``kv_indptr[b] // TILE + b + t``.
    """

    tile_ptr: torch.Tensor  # int32 [total // TILE + batch + 1]: where each tile's rotations begin
    by: torch.Tensor  # int32 [count], from the cached position
    bits: torch.Tensor  # int64 [count]; bit i: entry i of the tile


class RowPlan(NamedTuple):
    """Which slots the queries of a forward read; every layer uses the same.

    Entries of request b are ``kv_indptr[b]`` to ``kv_indptr[b + 1]``, in the order of their
    positions, single tokens whatever the page size of the pool.
    """

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [total], slots
    #: int32 ``[total]``, positions by which to rotate each key (where it is used minus where it
    #: was cached); None where all are 0.
    shift: torch.Tensor | None
    rotations: Rotations | None = None  # None: every position is an entry


class BatchRows(NamedTuple):
    """Of one forward."""

    plan: Any  # a RowPlan; on a GPU PlanBuffers with positions
    requests: torch.Tensor  # int [batch], rows
    lengths: torch.Tensor  # int [batch], their positions, new ones included
    longest: int  # upper bound on lengths
