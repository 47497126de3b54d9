# SPDX-License-Identifier: Apache-2.0
"""The plan of a batch's rows: which slots the queries of a forward read."""

from __future__ import annotations

from typing import NamedTuple

import torch

#: Entries of a request that share a list of rotations; a rotation has a bit for each of them.
TILE = 64


class Rotations(NamedTuple):
    """The rotations of a plan, in a list for each tile that uses a key at another position than its cached one.

    Tile t of request b has the number ``kv_indptr[b] // TILE + b + t``. A tile without a list uses each of
    its keys once, as cached. The first rotation of a list is by 0; its bits are the keys that are used as
    cached. The other rotations follow in any order. Bits beyond the entries of a tile mean nothing.
    """

    tile_ptr: torch.Tensor  # int32 [total // TILE + batch + 1]: where each tile's list begins
    by: torch.Tensor  # int32 [count]: positions from the cached one
    bits: torch.Tensor  # int64 [count]; bit i: entry i of the tile is used rotated by this


class RowPlan(NamedTuple):
    """Which slots the queries of a forward read; every layer uses the same.

    Entries of request b are ``kv_indptr[b]`` to ``kv_indptr[b + 1]``, in the order of their
    positions, single tokens whatever the page size of the pool. In a merged plan a position has no
    entry if the row also names its slot at the slot's cached position, and there is no ``shift``.
    """

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [total], slots
    #: int32 ``[total]``, positions by which to rotate each key (where it is used minus where it
    #: was cached); None: all are 0, or ``rotations`` tells.
    shift: torch.Tensor | None
    rotations: Rotations | None = None  # None: every key is used as ``shift`` says
