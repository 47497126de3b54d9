# SPDX-License-Identifier: Apache-2.0
"""Reads the pool for the blocks of one scheduler step: slots, distances, copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sglang_reasoncache.attention.rotation import KeyRotation
from sglang_reasoncache.cache.home import HomePositions
from sglang_reasoncache.kernels.distance import block_distances, squared_differences
from sglang_reasoncache.sharing.decision import BlockProposal


class Located(NamedTuple):
    """Slots of a list of blocks, int64 ``[blocks, block_length]`` each."""

    dst_slots: torch.Tensor
    src_slots: torch.Tensor

    def select(self, chosen: Sequence[int]) -> Located:
        index = torch.tensor(chosen, dtype=torch.int64, device=self.dst_slots.device)
        return Located(self.dst_slots[index], self.src_slots[index])


class BlockMeter:
    """Distances over all layers, and over all heads when they are split over ranks.

    Args:
        pool: SGLang's ``MHATokenToKVPool``.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        home: Slots' home positions; with ``rotation`` keys are compared as
            they would be used, without it as cached.
        num_heads: KV heads over all ranks.
        group: CPU process group of the tensor-parallel ranks, None when alone.
            Every rank then calls :meth:`distances` with the same blocks, because
            all of them see the same tokens.
    """

    def __init__(
        self,
        pool: Any,
        rows: torch.Tensor,
        home: HomePositions,
        rotation: KeyRotation | None,
        num_heads: int,
        group: Any = None,
    ) -> None:
        self._layer_ids = range(pool.start_layer, pool.start_layer + pool.layer_num)
        self._pool = pool
        self._rows = rows
        self._home = home
        self.rotation = rotation
        self._num_heads = num_heads
        self._group = group

    def locate(self, blocks: Sequence[BlockProposal]) -> Located:
        """Look the blocks' slots up in their rows. All have the same length; at least one."""
        dst_at, src_at, row = self._positions(blocks)
        return Located(
            self._rows[row[:, None], dst_at].long(), self._rows[row[:, None], src_at].long()
        )

    def distances(self, blocks: Sequence[BlockProposal], located: Located) -> list[float]:
        """KV distance per block, in one pass over the pool; waits for the device once."""
        dst_at, _, _ = self._positions(blocks)
        rotation, angles = self._rotation(dst_at, located.src_slots)
        rotate = None if rotation is None else lambda keys: rotation.rotate(keys, angles)
        squares = squared_differences(
            self._layers(), located.dst_slots, located.src_slots, rotate
        ).cpu()
        if self._group is not None:
            torch.distributed.all_reduce(squares, group=self._group)
        return block_distances(squares, blocks[0].length, self._num_heads).tolist()

    def copy(self, blocks: Sequence[BlockProposal], located: Located) -> None:
        """Write the source's K and V into the destination's own slots (``--reasoncache-apply copy``)."""
        dst_at, _, _ = self._positions(blocks)
        rotation, angles = self._rotation(dst_at, located.src_slots)
        for keys, values in self._layers():
            source = keys[located.src_slots]
            if rotation is not None:
                # Slots used where they were computed are copied bit for bit.
                source = torch.where(
                    (angles.sin != 0).any(-1)[..., None, None],
                    rotation.rotate(source, angles).to(keys.dtype),
                    source,
                )
            keys[located.dst_slots] = source
            values[located.dst_slots] = values[located.src_slots]

    def _positions(
        self, blocks: Sequence[BlockProposal]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = self._rows.device
        within = torch.arange(blocks[0].length, device=device)
        dst = torch.tensor([b.dst_start for b in blocks], device=device)[:, None] + within
        src = torch.tensor([b.src_start for b in blocks], device=device)[:, None] + within
        row = torch.tensor([b.req.kv.req_pool_idx for b in blocks], device=device)
        return dst, src, row

    def _rotation(
        self, dst_at: torch.Tensor, src_slots: torch.Tensor
    ) -> tuple[KeyRotation | None, Any]:
        """How to turn the source keys to where they would be used, and by how much; None as cached."""
        if self.rotation is None:
            return None, None
        return self.rotation, self.rotation.angles(self._home.shift(src_slots, dst_at))

    def _layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (self._pool.get_key_buffer(i), self._pool.get_value_buffer(i)) for i in self._layer_ids
        ]
