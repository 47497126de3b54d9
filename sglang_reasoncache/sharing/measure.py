# SPDX-License-Identifier: Apache-2.0
"""Reads slots and KV distances of a batch of block pairs from the device."""

from collections.abc import Mapping, Sequence

import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.download import Download
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat import kv_of, shared_layers
from sglang_reasoncache.compat.types import KVPool
from sglang_reasoncache.kernels.distance import DistanceKernel, Layer, block_distances
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.sharing.decision import BlockProposal


class Measurement(Download):
    """Slots and sums of squares of a batch of block pairs, being copied from device to host.

    ``dst_slots`` and ``src_slots`` are int64 ``[blocks, length]``.
    """

    def __init__(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, sums: torch.Tensor
    ) -> None:
        super().__init__(dst_slots, src_slots, sums)
        self.block = dst_slots.shape[1]

    @property
    def sums(self) -> torch.Tensor:
        """Sums over this rank's heads, on the host; :class:`DistanceKernel` gives shape and dtype."""
        return self.host[2]

    def slots(self) -> tuple[list[list[int]], list[list[int]]]:
        """Destination and source slots of every block, each ``[blocks][length]``."""
        return self.host[0].tolist(), self.host[1].tolist()


class BlockMeter:
    """Computes KV distances over all layers that share, and over the KV heads of all tensor-parallel ranks.

    Args:
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        rotations: By layer: rotates a source key, before it is compared, to the position that would read it.
            None: keys are compared as cached.
        num_heads: KV heads of all ranks together; 1 for latent rows.
        ranks: Ranks whose sums are added; all measure the same blocks in the same order. Every rank holds
            latent rows whole; their sums are added too, so that ranks get the same bits.
    """

    def __init__(
        self,
        pool: KVPool,
        rows: torch.Tensor,
        cached_at: CachedPositions,
        rotations: Mapping[int, KeyRotation] | None,
        num_heads: int,
        ranks: Ranks,
    ) -> None:
        self._layers: dict[KeyRotation | None, list[Layer]] = {}
        for layer in shared_layers(pool):
            rotation = None if rotations is None else rotations[layer]
            self._layers.setdefault(rotation, []).append(kv_of(pool, layer))
        # One kernel for each rotation. Most models have one rotation.
        self._kernels = [DistanceKernel(some, rotation) for rotation, some in self._layers.items()]
        self._rows, self._cached_at, self._corrects = rows, cached_at, rotations is not None
        self._num_heads, self._ranks = num_heads, ranks

    @property
    def backend(self) -> str:
        """What computes the distances: see ``kernels.paged.BACKENDS``."""
        return self._kernels[0].backend

    def warm_up(self, block: int) -> None:
        """Compile the kernels for blocks of ``block`` tokens, before requests come."""
        slots = torch.zeros((1, block), dtype=torch.int64, device=self._rows.device)
        self._squares(slots, slots, slots.int() if self._corrects else None)

    def measure(self, blocks: Sequence[BlockProposal]) -> Measurement:
        """Compare K and V of block pairs of one length. On a GPU this launches kernels without waiting."""
        device = self._rows.device
        within = torch.arange(blocks[0].length, device=device)
        reqs = [(b.req.kv.req_pool_idx, b.lender.kv.req_pool_idx) for b in blocks]
        starts = [(b.dst_start, b.src_start) for b in blocks]
        rows, at = upload(reqs, device), upload(starts, device)
        dst, src = at[:, 0:1] + within, at[:, 1:2] + within
        dst_slots = self._rows[rows[:, 0:1], dst].long()
        src_slots = self._rows[rows[:, 1:2], src].long()
        sums = self._squares(dst_slots, src_slots, self._shift(src_slots, dst))
        return Measurement(dst_slots, src_slots, sums)

    def _shift(self, src_slots: torch.Tensor, used_at: torch.Tensor) -> torch.Tensor | None:
        return self._cached_at.shift(src_slots, used_at) if self._corrects else None

    def _squares(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """Sums of squares over all layers. Layers with the same rotation are side by side."""
        sides = dst_slots, src_slots, shift
        first, *others = (kernel.squares(*sides) for kernel in self._kernels)
        return torch.cat((first, *others), dim=1) if others else first

    def distances(self, measured: Measurement) -> list[float]:
        """KV distance of each block. All tensor-parallel ranks call this together."""
        sums = measured.sums
        self._ranks.add(sums)
        return block_distances(sums, measured.block, self._num_heads).tolist()
