# SPDX-License-Identifier: Apache-2.0
"""Measures KV distances of block pairs (see ``kernels/distance.py``), and decides which pairs may share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat import kv_of, shared_layers
from sglang_reasoncache.compat.types import KVPool
from sglang_reasoncache.device.download import Download
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.kernels.distance import DistanceKernel, Layer, block_distances
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.sharing.decision import BlockProposal

_LOW, _HIGH, _PER_DECADE = 1e-7, 1e3, 256
#: Upper edges of the bins in the histogram of distances: 0, 1e-7, then 256 edges per factor of ten up to 1e3.
#: One more bin holds larger distances and counts them as 1e3. A distance in [1e-7, 1e3] counts as the upper
#: edge of its bin, which is at most 10 ** (1 / 256) = 1.00904 times the distance.
_EDGES = np.concatenate(
    [[0.0, _LOW], _LOW * 10.0 ** (np.arange(1, 10 * _PER_DECADE + 1) / _PER_DECADE), [_HIGH]]
)
#: All counts of the histogram are halved when their sum exceeds this number. Recent distances then weigh more,
#: so the percentile follows the load of a server that runs for weeks.
_FULL = 2.0**21


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
        self._rows, self._cached_at, self._corrects = rows, cached_at, rotations is not None
        self._num_heads, self._ranks = num_heads, ranks

    def warm_up(self, block: int) -> None:
        """Run the kernels once for blocks of ``block`` tokens, so they are compiled before requests arrive."""
        slots = torch.zeros((1, block), dtype=torch.int64, device=self._rows.device)
        self._squares(slots, slots, slots.int() if self._corrects else None)

    def measure(self, blocks: Sequence[BlockProposal]) -> Measurement:
        """Compare K and V of block pairs, all of one length. On a GPU this does not wait for the kernels."""
        device = self._rows.device
        within = torch.arange(blocks[0].length, device=device)
        reqs = [(b.req.kv.req_pool_idx, b.lender.kv.req_pool_idx) for b in blocks]
        starts = [(b.dst_start, b.src_start) for b in blocks]
        rows, at = upload(reqs, device), upload(starts, device)
        dst, src = at[:, 0:1] + within, at[:, 1:2] + within
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


class AdaptiveThreshold:
    """The adaptive threshold on KV distances (ReasonCache, stage 2): the p-th percentile of the distances seen.
    A pair may share if its distance is at most this percentile, which is computed from a histogram.

    If all distances are 0 or in [1e-7, 1e3], the threshold is at least the percentile that ``numpy.percentile``
    computes, and at most 0.91% above it. Once more than 2**21 distances were seen, older ones count less than
    newer ones. Not thread safe.

    Args:
        percentile: p, 0 to 100. With 0 no distance is accepted, with 100 every finite one after the warm-up.
        warmup: No distance is accepted before this many were seen.

    Attributes:
        num_observed: Number of distances seen since the start or the last :meth:`reset`.
        epoch: How often :meth:`reset` was called.
    """

    def __init__(self, percentile: float = 80.0, warmup: int = 128) -> None:
        self._percentile, self._warmup = percentile, warmup
        self.epoch = -1
        self.reset()

    def reset(self) -> None:
        """Forget all distances. Called when SGLang flushes its cache, because the weights may have changed."""
        self._bins = np.zeros(len(_EDGES))
        self.num_observed = 0
        self.epoch += 1

    @property
    def share(self) -> float:
        """The fraction of distances that are accepted in the long run, 0 to 1."""
        return self._percentile / 100

    @property
    def is_warm(self) -> bool:
        return self.num_observed >= self._warmup

    @property
    def value(self) -> float:
        """The largest distance accepted now; negative if no distance is accepted, infinite if all are."""
        if self._percentile <= 0 or not self.is_warm:
            return -1.0
        return math.inf if self._percentile >= 100 else self._value()

    def decide(self, distances: Sequence[float]) -> npt.NDArray[np.bool_]:
        """Observe ``n`` distances, then judge them. Returns bool ``[n]``: for each, whether the pair may share.

        NaN, infinite and negative distances are neither observed nor accepted.
        """
        values = np.asarray(distances, dtype=np.float64)
        is_distance = np.isfinite(values) & (values >= 0)
        at = np.searchsorted(_EDGES[:-1], values[is_distance])
        self._bins += np.bincount(at, minlength=len(_EDGES))
        if self._bins.sum() > _FULL:
            self._bins /= 2
        self.num_observed += len(at)
        return is_distance & (values <= self.value)

    def describe(self) -> dict[str, Any]:
        """JSON for the endpoint. ``distance`` is :attr:`value`, or None if that is infinite."""
        value = self.value
        return {
            "percentile": self._percentile,
            "observations": self.num_observed,
            "warm": self.is_warm,
            "distance": value if math.isfinite(value) else None,
        }

    def _value(self) -> float:
        """The percentile, computed from the histogram; -1 if no distance was seen."""
        cumulated = np.cumsum(self._bins)
        if not cumulated[-1] > 0:
            return -1.0
        rank = max(0.0, (cumulated[-1] - 1.0) * self._percentile / 100.0)
        lower = math.floor(rank)
        # ``last`` is the last bin in use. After a single distance, the search for ``lower + 1`` ends beyond it.
        last = np.searchsorted(cumulated, cumulated[-1])
        at = np.minimum(np.searchsorted(cumulated, [lower, lower + 1], side="right"), last)
        low, high = _EDGES[at].tolist()
        return float(low + (high - low) * (rank - lower))
