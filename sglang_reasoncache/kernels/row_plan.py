# SPDX-License-Identifier: Apache-2.0
"""The plan of a forward: which slots each request reads, as FlashInfer's ``kv_indptr`` and ``kv_indices``."""

from typing import NamedTuple

import torch

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
    #: cached position. None in merged plans. ``plan.plan_rows`` also makes it None if all shifts are 0.
    shift: torch.Tensor | None
    rotations: Rotations | None = None  # None: every key is used once, rotated by its ``shift``
