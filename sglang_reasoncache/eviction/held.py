# SPDX-License-Identifier: Apache-2.0
"""Keys and attention statistics of a request's held positions, over all tensor-parallel ranks.

``held``: int64, positions of a row, none evicted. What is read is valid until the next forward.
Nothing waits for a device: its numbers come later, see :class:`Reads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cache.download import Download
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
    stream: Any = None  # on which a GPU's forwards run


class Reads:
    """What one decision of a policy reads, in order. On a GPU it is zeros the first time, to see what
    is read, and the numbers when the policy is asked again after :meth:`ready`.

    ``late``: something was not there, so that the answer means nothing. ``asked``: how often the
    policy was asked before.
    """

    def __init__(self, ranks: Ranks = _ALONE) -> None:
        self.late, self.asked = False, 0
        self._ranks, self._at = ranks, 0
        self._numbers: list[Download] = []

    def ready(self) -> bool:
        """Whether it has arrived, on all ranks, which ask together; the policy is asked anew.
        Raises RuntimeError on a rank that read more than another, whose policy failed."""
        self.late, self._at, self.asked = False, 0, self.asked + 1
        arrived, count = all(one.ready() for one in self._numbers), len(self._numbers)
        least = self._ranks.least(count if arrived else -1)
        if 0 <= least < count:
            raise RuntimeError("another tensor-parallel rank read less for a policy")
        return least >= 0

    def next(self, read: Callable[[], torch.Tensor], heads: int) -> np.ndarray:
        """What ``read`` gives, fp64 ``[held]``, summed over ranks and divided by ``heads``."""
        at, self._at = self._at, self._at + 1
        if at == len(self._numbers):
            self._numbers.append(Download(read()))
            self.late = self.late or not self._numbers[at].is_immediate
        (found,) = self._numbers[at].host
        if self.late:
            return np.zeros(len(found))
        sums = found.clone()
        self._ranks.add(sums)
        return (sums / heads).numpy()


class HeldKeys:
    """See :class:`~sglang_reasoncache.eviction.policies.contract.Keys`."""

    def __init__(
        self, source: KeySource, row: int, held: np.ndarray, reads: Reads | None = None
    ) -> None:
        self._source, self._row, pool = source, row, source.pool
        self._reads = Reads(source.ranks) if reads is None else reads
        self.layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        # Whatever a policy does to its view.
        self._held = held.copy()
        self._slots: tuple[int, torch.Tensor] | None = None

    def _where(self) -> torch.Tensor:
        asked = self._reads.asked
        if self._slots is None or self._slots[0] != asked:
            # Since the policy was asked, slots were given up; evicted positions read SGLang's padding.
            rows = self._source.rows
            slots = rows[self._row, upload(self._held, rows.device)]
            self._slots = asked, slots.long().clamp(min=0)
        return self._slots[1]

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

        def scores() -> torch.Tensor:
            total = torch.zeros(len(self._held), dtype=torch.float64, device=source.rows.device)
            for layer in self.layers:
                total += score(read(layer)).sum(dim=1)
            return total

        return self._reads.next(scores, len(self.layers) * source.num_heads)


class AttentionSource(NamedTuple):
    """Of this rank's attention backend; ``heads``: query heads of all layers and ranks."""

    statistics: AttentionStatistics
    heads: int
    ranks: Ranks = _ALONE


class HeldAttention:
    """See :class:`~sglang_reasoncache.eviction.policies.contract.Attention`."""

    def __init__(
        self, source: AttentionSource, row: int, held: np.ndarray, reads: Reads | None = None
    ) -> None:
        self._source, self._row, self._held = source, row, held.copy()
        self._reads = Reads(source.ranks) if reads is None else reads

    def latest(self, queries: int) -> np.ndarray:
        read = self._source.statistics.latest
        return self._reads.next(lambda: read(self._row, self._held, queries), self._source.heads)

    def total(self) -> np.ndarray:
        read = self._source.statistics.total
        return self._reads.next(lambda: read(self._row, self._held), self._source.heads)
