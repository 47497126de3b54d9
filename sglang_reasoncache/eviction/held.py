# SPDX-License-Identifier: Apache-2.0
"""Reads a request's newest queries, and the keys of its held (not evicted) positions. The host never waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat import layer_ids
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.eviction.recent_queries import RecentQueries
from sglang_reasoncache.kernels.paged import read_keys, read_rows
from sglang_reasoncache.kernels.rotation import KeyRotation

#: At most this many logits are computed at once: 64 MiB of fp32.
_LOGITS = 1 << 24


class KeySource(NamedTuple):
    """What :class:`HeldLayer` reads keys and queries from. Each scheduler process has one ``KeySource``."""

    pool: Any  # SGLang's ``MHATokenToKVPool``
    rows: torch.Tensor  # ``req_to_token``, int32 ``[max_requests, max_context]``
    cached_at: CachedPositions
    #: Layer id -> rotation of the layer's keys. None if cached positions are not recorded in ``cached_at``.
    rotations: Mapping[int, KeyRotation] | None = None
    queries: RecentQueries | None = None  # None if no policy reads queries
    stream: Any = None  # the CUDA stream of SGLang's forward passes; None on a CPU

    def layers(self, row: int, held: np.ndarray, written: int, *, shifted: bool) -> list[HeldLayer]:
        """One :class:`HeldLayer` for each layer.

        Args:
            row: Index in ``req_to_token``.
            held: Positions below ``written`` that are not evicted: int64 ``[held]``.
            shifted: Whether a slot may be used at a position for which its key was not rotated.
        """
        if self.stream is not None:
            # Reads are queued behind the forward pass in flight, which may still be writing keys and queries.
            torch.cuda.current_stream().wait_stream(self.stream)
        positions = upload(held, self.rows.device)
        slots = self.rows[row, positions].long()
        shift = None
        if shifted and self.rotations is not None:
            shift = self.cached_at.shift(slots, positions)
        where = row, positions, slots, shift
        return [HeldLayer(self, number, where, written) for number in layer_ids(self.pool)]


class HeldLayer:
    """Implements :class:`~sglang_reasoncache.eviction.policies.contract.Layer` for one request."""

    def __init__(
        self,
        source: KeySource,
        number: int,
        where: tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None],
        written: int,
    ) -> None:
        """``where``: index in ``req_to_token``; held positions, int64 ``[held]``; slots of the held positions,
        int64 ``[held]``; by how many positions to rotate each key, int32 ``[held]``, or None to rotate none."""
        self._source = source
        self._number = number
        self._written = written
        self._row, self._positions, self._slots, self._shift = where
        self.rotation = None if source.rotations is None else source.rotations[number]

    def stored(self) -> torch.Tensor:
        return read_rows(self._source.pool.get_key_buffer(self._number), self._slots)

    def used(self) -> torch.Tensor:
        keys = self._source.pool.get_key_buffer(self._number)
        return read_keys(keys, self._slots, self._shift, self.rotation)

    def queries(
        self, first: int, end: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        recent = self._source.queries
        assert recent is not None, "kept where a policy reads queries"
        end = self._written + 1 if end is None else end
        return recent.read(self._number, self._row, first, end)

    def weights(
        self, first: int, end: int | None = None, newest: int | None = None
    ) -> torch.Tensor:
        assert self._source.queries is not None, "kept where a policy reads queries"
        shape = self._source.queries.layers[self._number]
        keys = self.used().transpose(0, 1)
        total = keys.new_zeros((shape.heads, keys.shape[1]))
        at_once = max(1, _LOGITS // max(1, total.numel()))
        *newest_queries, all_kept = self.queries(first, end)
        if newest is not None:
            all_kept = all_kept & (all_kept.flip(0).cumsum(0).flip(0) <= newest)
        parts = (*newest_queries, all_kept)
        for some in zip(*(part.split(at_once) for part in parts), strict=True):
            queries, positions, kept = some
            grouped = queries.unflatten(1, (len(keys), -1)) * shape.scale
            logits = torch.einsum("qkgd,khd->qkgh", grouped, keys).flatten(1, 2)
            if shape.logit_cap > 0:
                logits = shape.logit_cap * torch.tanh(logits / shape.logit_cap)
            hidden = self._positions > positions[:, None]
            weights = logits.masked_fill(hidden[:, None], -torch.inf).softmax(dim=-1)
            # A query adds no weight if it was not kept, or if all held positions come after it.
            weights = torch.where(kept[:, None, None], weights, 0.0).nan_to_num(0.0)
            total += weights.sum(dim=0)
        return total
