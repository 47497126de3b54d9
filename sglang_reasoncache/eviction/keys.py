# SPDX-License-Identifier: Apache-2.0
"""Keys of a request's held positions, read from the pool when a policy needs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.kernels.paged import read_rows
from sglang_reasoncache.kernels.rotation import KeyRotation


class KeySource:
    """One per scheduler.

    Args:
        pool: SGLang's ``MHATokenToKVPool``.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        cached_at: Slots' cached positions.
        rotation: To take rotary embedding off; None where cached positions are not recorded.
        num_heads: KV heads over all ranks.
        group: CPU process group of the tensor-parallel ranks, None when alone.
    """

    def __init__(
        self,
        pool: Any,
        rows: torch.Tensor,
        cached_at: CachedPositions,
        rotation: KeyRotation | None,
        num_heads: int,
        group: Any = None,
    ) -> None:
        self.layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        self.buffers = [pool.get_key_buffer(layer) for layer in self.layers]
        self.rows, self.cached_at, self.rotation = rows, cached_at, rotation
        self.num_heads, self.group = num_heads, group

    def wait(self) -> None:
        """Until the device has done all that is queued, on whichever stream."""
        if self.rows.device.type == "cuda":
            torch.cuda.synchronize(self.rows.device)

    def of(self, row: int, held: np.ndarray) -> HeldKeys:
        """Keys of positions ``held`` (int64, none evicted) of a row."""
        return HeldKeys(self, row, held)


class HeldKeys:
    """See :class:`~sglang_reasoncache.eviction.policies.contract.Keys`. Valid until the next forward."""

    def __init__(self, source: KeySource, row: int, held: np.ndarray) -> None:
        self._source = source
        self.layers = source.layers
        self._row = row
        # Whatever a policy does to its view.
        self._held = held.copy()
        self._slots: torch.Tensor | None = None

    def _where(self) -> torch.Tensor:
        if self._slots is None:
            rows = self._source.rows
            self._slots = rows[self._row, upload(self._held, rows.device)].long()
        return self._slots

    def cached_at(self) -> torch.Tensor:
        return self._source.cached_at.positions[self._where()].long()

    def stored(self, layer: int) -> torch.Tensor:
        return read_rows(self._source.buffers[layer - self.layers.start], self._where())

    def unrotated(self, layer: int) -> torch.Tensor:
        rotation = self._source.rotation
        if rotation is None:
            raise RuntimeError("a policy that un-rotates keys is refused at start-up")
        return rotation.rotate(self.stored(layer), -self.cached_at())

    def token_scores(
        self, score: Callable[[torch.Tensor], torch.Tensor], *, unrotated: bool = False
    ) -> np.ndarray:
        source, read = self._source, self.unrotated if unrotated else self.stored
        total = torch.zeros(len(self._held), dtype=torch.float64, device=source.rows.device)
        for layer in self.layers:
            total += score(read(layer)).sum(dim=1)
        total = total.cpu()
        if source.group is not None:
            torch.distributed.all_reduce(total, group=source.group)
        return (total / (len(self.layers) * source.num_heads)).numpy()
