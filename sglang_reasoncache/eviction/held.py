# SPDX-License-Identifier: Apache-2.0
"""Keys and attention statistics of a request's held positions, over all tensor-parallel ranks.

``held``: int64, positions of a row, none evicted. What is read is valid until the next forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.statistics import AttentionStatistics
from sglang_reasoncache.kernels.paged import read_rows
from sglang_reasoncache.kernels.rotation import KeyRotation

_ALONE = Ranks()


class KeySource(NamedTuple):
    """One per scheduler."""

    pool: Any  # SGLang's ``MHATokenToKVPool``
    rows: torch.Tensor  # ``req_to_token``, int32 ``[max_requests, max_context]``
    cached_at: CachedPositions
    rotation: KeyRotation | None  # to take it off; None: cached positions are not recorded
    num_heads: int  # KV heads over all ranks
    ranks: Ranks = _ALONE


class HeldKeys:
    """See :class:`~sglang_reasoncache.eviction.policies.contract.Keys`."""

    def __init__(self, source: KeySource, row: int, held: np.ndarray) -> None:
        self._source, self._row, pool = source, row, source.pool
        self.layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
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
        return read_rows(self._source.pool.get_key_buffer(layer), self._where())

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
        return _over_ranks(total.cpu(), source.ranks, len(self.layers) * source.num_heads)


class AttentionSource(NamedTuple):
    """Of this rank's attention backend; ``heads``: query heads of all layers and ranks."""

    statistics: AttentionStatistics
    heads: int
    ranks: Ranks = _ALONE


class HeldAttention:
    """See :class:`~sglang_reasoncache.eviction.policies.contract.Attention`."""

    def __init__(self, source: AttentionSource, row: int, held: np.ndarray) -> None:
        self._source, self._row, self._held = source, row, torch.from_numpy(held.copy())

    def latest(self, queries: int) -> np.ndarray:
        statistics, heads, ranks = self._source
        return _over_ranks(statistics.latest(self._row, self._held, queries), ranks, heads)

    def total(self) -> np.ndarray:
        statistics, heads, ranks = self._source
        return _over_ranks(statistics.total(self._row, self._held), ranks, heads)


def _over_ranks(sums: torch.Tensor, ranks: Ranks, heads: int) -> np.ndarray:
    ranks.add(sums)
    return (sums / heads).numpy()
