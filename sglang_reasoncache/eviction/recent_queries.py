# SPDX-License-Identifier: Apache-2.0
"""Keeps the newest query vectors of each request and layer, for eviction policies that read them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reasoncache.device.upload import upload

#: Bytes of GPU memory that :class:`RecentQueries` must leave free for SGLang's forward passes.
_SPARE = 512 << 20


class LayerShape(NamedTuple):
    """Shape of a layer's queries, and how attention scales and caps the logits."""

    heads: int
    dim: int
    scale: float  # factor of the logits
    logit_cap: float  # soft cap of the logits, applied with tanh; 0 for no cap


class RecentQueries:
    """A ring buffer for each row of ``req_to_token``. Entry ``p % size`` holds the query of position ``p``.

    A decode step's writes have fixed shapes, so a CUDA graph can contain them, whatever kernel computes
    attention. Each row has ``window + 1`` entries, because the forward pass in flight adds a query.

    Args:
        layers: Layer id -> shape, for this rank's attention layers.
        generations: SGLang's ``req_generation``, int64 ``[rows]`` in host memory. It counts how often each
            row of ``req_to_token`` was given to a request.
        window: How many of a request's newest queries policies read.
        dtype, device: Dtype and device of the queries.

    Attributes:
        size: Number of entries per row, ``window + 1``.
        nbytes: Bytes that the queries of all rows and layers take.
        positions: int64 ``[rows, size]``: the position of the query in each entry; -1 for an empty entry.

    Raises:
        MemoryError: There is not enough free memory for the buffer. The message names the buffer's size.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        generations: torch.Tensor,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.window = window
        self.size = window + 1
        rows = len(generations)
        width = sum(layer.heads * layer.dim for layer in layers.values())
        self.nbytes = rows * self.size * width * dtype.itemsize
        memory = (
            f"{self.nbytes / 2**20:.0f} MiB for {window} queries of {rows} requests on {device}"
        )
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < self.nbytes + _SPARE:
            raise MemoryError(f"no {memory}")
        try:
            self._queries = {
                number: torch.zeros(
                    (rows, self.size, layer.heads, layer.dim), dtype=dtype, device=device
                )
                for number, layer in layers.items()
            }
        except RuntimeError as error:
            raise MemoryError(f"no {memory}: {error}") from error
        self.positions = torch.full((rows, self.size), -1, device=device)
        self._generations = generations
        # For each row: the generation of the request whose queries the row holds.
        self._owners = torch.zeros(rows, dtype=torch.int64, device=device)
        self._device = device
        self._tokens: torch.Tensor | None = None
        self._where: tuple[torch.Tensor, torch.Tensor] | None = None

    # -- a forward ------------------------------------------------------------------

    def forget(self) -> None:
        """Stop keeping queries until the next ``begin_decode`` or ``begin_extend``."""
        self._where = self._tokens = None

    def begin_decode(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Begin a decode step, with one token of each request. A CUDA graph may contain this call.

        ``rows``: indexes in ``req_to_token``, int ``[batch]``; ``positions``: int64 ``[batch]``. Both on
        the device.
        """
        self._where = rows.long(), positions % self.size
        self.positions[self._where] = positions

    def begin_extend(self, rows: torch.Tensor, positions: torch.Tensor, new: Sequence[int]) -> None:
        """Begin a prefill, or a chunk of one. Only a request's last ``window`` queries are kept. If SGLang has
        given a row to another request since the row's last prefill, the row's older queries are dropped.

        Args:
            rows: Indexes in ``req_to_token``, int ``[batch]``, on the device.
            positions: Positions of all new tokens, int64 ``[tokens]``, on the device.
            new: Number of new tokens of each request.
        """
        rows = rows.long()
        owners = upload(self._generations.numpy(), self._device)[rows]
        self.positions[rows] = self.positions[rows].where(
            (self._owners[rows] == owners)[:, None], -1
        )
        self._owners[rows] = owners
        counts = np.minimum(new, self.window)
        ends = np.cumsum(new)
        tokens = [np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)]
        self._tokens = upload(np.concatenate(tokens), self._device)
        of = upload(np.repeat(np.arange(len(counts)), counts), self._device)
        self.begin_decode(rows[of], positions[self._tokens])

    def keep(self, layer: int, queries: torch.Tensor) -> None:
        """Store a layer's queries of the current forward pass: ``[tokens, heads * dim]``, after rotary
        embedding."""
        if self._where is not None:
            some = queries if self._tokens is None else queries[self._tokens]
            into = self._queries[layer]
            into[self._where] = some.view(-1, *into.shape[2:]).to(into.dtype)

    # -- for a policy, between forwards ---------------------------------------------

    def read(
        self, layer: int, row: int, first: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of positions ``[first, end)`` of a row, but only the last ``size`` of them. Returns the same
        three tensors as ``policies.contract.Layer.queries``. Before the call, the caller must make the current
        stream wait for the forward passes that wrote these queries."""
        at = np.arange(max(first, end - self.size, 0), end)
        positions = upload(at, self._device)
        entries = positions % self.size
        queries = self._queries[layer][row, entries].float()
        return queries, positions, self.positions[row, entries] == positions
