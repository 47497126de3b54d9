# SPDX-License-Identifier: Apache-2.0
"""Reads the pool for a wave of blocks: slots, distances, copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.kernels.distance import DistanceKernel, block_distances, cosine_distances
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.sharing.decision import BlockProposal


class Measurement:
    """A wave's slots and sums, on their way from the device to the host.

    Attributes:
        rows: int64 ``[blocks, 1]``, row of each block's request.
        dst_at: int64 ``[blocks, length]``, destination positions.
        dst_slots: int64 ``[blocks, length]``.
        src_slots: int64 ``[blocks, length]``.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        dst_at: torch.Tensor,
        dst_slots: torch.Tensor,
        src_slots: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        self.rows = rows
        self.dst_at = dst_at
        self.dst_slots = dst_slots
        self.src_slots = src_slots
        self._host: list[torch.Tensor] = [dst_slots, src_slots, sums]
        self._arrived: torch.cuda.Event | None = None
        if sums.is_cuda:
            # Nobody waits: the copies run behind the kernels, an event tells when.
            self._host = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                for t in self._host
            ]
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def is_immediate(self) -> bool:
        """Nothing was in flight to begin with: the same on every rank, whatever the time."""
        return self._arrived is None

    def ready(self) -> bool:
        """Whether :attr:`sums` and :meth:`slots` can be had without waiting."""
        return self._arrived is None or self._arrived.query()

    @property
    def sums(self) -> torch.Tensor:
        """On the host, of this rank's heads; see :class:`DistanceKernel` for the shape."""
        return self._host[2]

    def slots(self) -> tuple[list[list[int]], list[list[int]]]:
        """Destination and source slots of every block, as host numbers."""
        return self._host[0].tolist(), self._host[1].tolist()


class BlockMeter:
    """Distances over all layers, and over all heads when they are split over ranks.

    Args:
        pool: SGLang's ``MHATokenToKVPool``.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        home: Slots' cached positions; with ``rotation`` keys are compared as
            they would be used, without it as cached.
        num_heads: KV heads over all ranks.
        group: CPU process group of the tensor-parallel ranks, None when alone.
            Every rank then measures the same blocks in the same order.
        cosine: Compare by angle instead of the papers' Euclidean distance.
    """

    def __init__(
        self,
        pool: Any,
        rows: torch.Tensor,
        cached_at: CachedPositions,
        rotation: KeyRotation | None,
        num_heads: int,
        group: Any = None,
        cosine: bool = False,
    ) -> None:
        layer_ids = range(pool.start_layer, pool.start_layer + pool.layer_num)
        self._layers = [(pool.get_key_buffer(i), pool.get_value_buffer(i)) for i in layer_ids]
        self._kernel = DistanceKernel(self._layers, rotation)
        self._rows = rows
        self._cached_at = cached_at
        self.rotation = rotation
        self._num_heads = num_heads
        self._group = group
        self._cosine = cosine

    @property
    def backend(self) -> str:
        """What computes the distances: see ``kernels.distance.BACKENDS``."""
        return self._kernel.backend

    def warm_up(self, block: int) -> None:
        """Compile what measuring blocks of this many tokens needs, before requests come."""
        slots = torch.zeros((1, block), dtype=torch.int64, device=self._rows.device)
        shift = None if self.rotation is None else torch.zeros_like(slots, dtype=torch.int32)
        compare = self._kernel.moments if self._cosine else self._kernel.squares
        compare(slots, slots, shift)

    def measure(self, blocks: Sequence[BlockProposal]) -> Measurement:
        """Look the blocks' slots up in their rows and compare what they hold.

        All have the same length; at least one. On a GPU this only launches.
        """
        device = self._rows.device
        within = torch.arange(blocks[0].length, device=device)
        places = upload([(b.req.kv.req_pool_idx, b.dst_start, b.src_start) for b in blocks], device)
        rows, dst, src = places[:, 0:1], places[:, 1:2] + within, places[:, 2:3] + within
        dst_slots = self._rows[rows, dst].long()
        src_slots = self._rows[rows, src].long()
        shift = None if self.rotation is None else self._cached_at.shift(src_slots, dst)
        compare = self._kernel.moments if self._cosine else self._kernel.squares
        return Measurement(rows, dst, dst_slots, src_slots, compare(dst_slots, src_slots, shift))

    def distances(self, measured: Measurement) -> list[float]:
        """KV distance per block; under tensor parallelism all ranks call this together."""
        sums = measured.sums
        if self._group is not None:
            torch.distributed.all_reduce(sums, group=self._group)
        if self._cosine:
            return cosine_distances(sums).tolist()
        return block_distances(sums, measured.dst_slots.shape[1], self._num_heads).tolist()

    def copy(self, chosen: Sequence[int], measured: Measurement) -> None:
        """Write the source's K and V into the destination's own slots (``--reasoncache-apply copy``)."""
        index = upload(chosen, self._rows.device)
        dst_slots, src_slots = measured.dst_slots[index], measured.src_slots[index]
        angles = None
        if self.rotation is not None:
            angles = self.rotation.angles(self._cached_at.shift(src_slots, measured.dst_at[index]))
        for keys, values in self._layers:
            source = keys[src_slots]
            if self.rotation is not None and angles is not None:
                # Slots used where they were computed are copied bit for bit.
                source = torch.where(
                    (angles.sin != 0).any(-1)[..., None, None],
                    self.rotation.rotate(source, angles).to(keys.dtype),
                    source,
                )
            keys[dst_slots] = source
            values[dst_slots] = values[src_slots]
