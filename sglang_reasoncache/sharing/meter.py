# SPDX-License-Identifier: Apache-2.0
"""Measures KV distances of block pairs (see ``kernels/distance.py``)."""

from collections.abc import Mapping, Sequence

import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat import kv_of, shared_layers
from sglang_reasoncache.compat.types import KVPool
from sglang_reasoncache.device.download import Download
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.kernels.distance import DistanceKernel, Layer, block_distances
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.sharing.blocks import BlockProposal


class Measurement(Download):
    """Copies the slots of block pairs, and the pairs' sums of squared KV differences, to host memory.

    Created as ``Measurement(dst_slots, src_slots, sums)``. Both slot tensors are int64 ``[blocks, length]``.
    """

    @property
    def sums(self) -> torch.Tensor:
        """The sums over this rank's KV heads, in host memory: fp64 ``[blocks, num_layers, 2]``."""
        return self.host[2]

    def slots(self) -> tuple[list[list[int]], list[list[int]]]:
        """The slots of the destinations and the slots of the sources, two lists ``[blocks][length]``."""
        return self.host[0].tolist(), self.host[1].tolist()


class BlockMeter:
    """Computes KV distances over all layers in which blocks share slots, and over the KV heads of all ranks.

    Args:
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        rotations: Layer id -> rotation of the layer's keys. Before a source key is compared, it is rotated to
            the position that would read it. None means that keys are compared as cached.
        num_heads: KV heads of all ranks together. With latent attention (MLA) each of n ranks has the whole KV.
            Their sums are added too, so that all ranks get identical results, and ``num_heads`` is sqrt(n).
        ranks: Adds up the sums of all ranks, which measure the same blocks in the same order.
    """

    def __init__(
        self,
        pool: KVPool,
        rows: torch.Tensor,
        cached_at: CachedPositions,
        rotations: Mapping[int, KeyRotation] | None,
        num_heads: float,
        ranks: Ranks,
    ) -> None:
        self._layers: dict[KeyRotation | None, list[Layer]] = {}
        for layer in shared_layers(pool):
            rotation = None if rotations is None else rotations[layer]
            self._layers.setdefault(rotation, []).append(kv_of(pool, layer))
        # One kernel for each rotation. In most models all layers have the same rotation.
        self._kernels = [DistanceKernel(some, rotation) for rotation, some in self._layers.items()]
        #: The implementation that computes the distances, see ``DistanceKernel.backend``.
        self.backend = self._kernels[0].backend
        self._rows = rows
        self._cached_at = cached_at
        self._corrects = rotations is not None
        self._num_heads = num_heads
        self._ranks = ranks

    def warm_up(self, block: int) -> None:
        """Run the kernels once for blocks of ``block`` tokens, so they are compiled before requests arrive."""
        slots = torch.zeros((1, block), dtype=torch.int64, device=self._rows.device)
        self._squares(slots, slots, slots.int() if self._corrects else None)

    def measure(self, blocks: Sequence[BlockProposal]) -> Measurement:
        """Compare K and V of block pairs, all of one length. On a GPU this does not wait for the kernels."""
        device = self._rows.device
        reqs = [(b.req.kv.req_pool_idx, b.lender.kv.req_pool_idx) for b in blocks]
        both = [(*range(b.dst_start, b.dst_end), *b.sources()) for b in blocks]
        rows = upload(reqs, device)
        at = upload(both, device)
        dst, src = at.split(blocks[0].length, dim=1)
        dst_slots = self._rows[rows[:, 0:1], dst].long()
        src_slots = self._rows[rows[:, 1:2], src].long()
        shift = self._cached_at.shift(src_slots, dst) if self._corrects else None
        sums = self._squares(dst_slots, src_slots, shift)
        return Measurement(dst_slots, src_slots, sums)

    def _squares(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """Sums of squared differences: fp64 ``[pairs, num_layers, 2]``. Layers are grouped by rotation."""
        sides = dst_slots, src_slots, shift
        first, *others = (kernel.squares(*sides) for kernel in self._kernels)
        return torch.cat((first, *others), dim=1) if others else first

    def distances(self, measured: Measurement) -> list[float]:
        """The KV distance between each block and its source. All tensor-parallel ranks call this together."""
        sums = measured.sums
        self._ranks.add(sums)
        return block_distances(sums, measured.host[0].shape[1], self._num_heads).tolist()
