# SPDX-License-Identifier: Apache-2.0
"""The newest queries of each row and layer, for policies that look at attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.upload import upload

#: Bytes of a GPU that are left for SGLang's forwards.
_SPARE = 512 << 20


class LayerShape(NamedTuple):
    """What attention of a layer does with its queries."""

    heads: int
    dim: int
    scale: float  # of the logits
    logit_cap: float  # of their tanh; 0: none


class RecentQueries:
    """A ring buffer beside the KV pool: the query of position p is in entry ``p % size`` of its row.

    Every forward writes with fixed shapes, so a CUDA graph can hold it, whatever kernel computes
    attention. There is one entry more than the window: a forward in flight writes that one.

    Args:
        layers: Attention layers of this rank.
        rows: Rows of ``req_to_token``, so requests that run at once.
        window: Newest queries that are read of a request.
        dtype, device: Of the queries.

    Attributes:
        positions: int64 ``[rows, size]``: whose query each entry is, -1 where there is none.

    Raises:
        MemoryError: There is none for the buffer, whose size the message names.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        rows: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.window, self.size = layers, window, window + 1
        width = sum(layer.heads * layer.dim for layer in layers.values())
        self.nbytes = rows * self.size * width * dtype.itemsize
        told = f"{self.nbytes / 2**20:.0f} MiB for {window} queries of {rows} requests on {device}"
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < self.nbytes + _SPARE:
            raise MemoryError(f"no {told}")
        try:
            self._queries = {
                number: torch.zeros(
                    (rows, self.size, layer.heads, layer.dim), dtype=dtype, device=device
                )
                for number, layer in layers.items()
            }
        except RuntimeError as error:
            raise MemoryError(f"no {told}: {error}") from error
        self.positions = torch.full((rows, self.size), -1, device=device)
        # Of each row: a number of the request whose queries these are.
        self._owners = torch.zeros(rows, dtype=torch.int64, device=device)
        self._device = device
        self._tokens: torch.Tensor | None = None
        self._where: tuple[torch.Tensor, torch.Tensor] | None = None

    # -- a forward ------------------------------------------------------------------

    def forget(self) -> None:
        """The next forward keeps no queries, until it begins."""
        self._where = self._tokens = None

    def begin_decode(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """A decode step, one token of each request. Part of a CUDA graph where there is one.

        ``rows``: int ``[batch]``; ``positions``: int64 ``[batch]``, on the device.
        """
        self._where = rows.long(), positions % self.size
        self.positions[self._where] = positions

    def begin_extend(
        self, rids: Sequence[str], rows: torch.Tensor, positions: torch.Tensor, new: Sequence[int]
    ) -> None:
        """A prefill or a chunk of one, of which the last queries of each request are kept.

        Args:
            rids: Ids of the requests. One that a row did not have before begins without queries.
            rows: int ``[batch]``, on the device.
            positions: int64 ``[tokens]``, of all tokens, on the device.
            new: Tokens of each request.
        """
        rows = rows.long()
        owners = upload([hash(rid) for rid in rids], self._device)
        self.positions[rows] = self.positions[rows].where(
            (self._owners[rows] == owners)[:, None], -1
        )
        self._owners[rows] = owners
        counts, ends = np.minimum(new, self.window), np.cumsum(new)
        tokens = [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
        self._tokens = upload(np.concatenate(tokens), self._device)
        of = upload(np.repeat(np.arange(len(counts)), counts), self._device)
        self.begin_decode(rows[of], positions[self._tokens])

    def keep(self, layer: int, queries: torch.Tensor) -> None:
        """``queries`` ``[tokens, heads * dim]`` of a layer in the forward that began, after rotary
        embedding."""
        if self._where is not None:
            some = queries if self._tokens is None else queries[self._tokens]
            into = self._queries[layer]
            into[self._where] = some.view(-1, *into.shape[2:]).to(into.dtype)

    # -- for a policy, between forwards ---------------------------------------------

    def read(
        self, layer: int, row: int, first: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of positions ``[first, end)`` of a row, as far as the buffer reaches: see
        ``policies.contract.Layer.queries``. The stream must be behind the forwards of these."""
        at = np.arange(max(first, end - self.size, 0), end)
        positions = upload(at, self._device)
        entries = positions % self.size
        queries = self._queries[layer][row, entries].float()
        return queries, positions, self.positions[row, entries] == positions
