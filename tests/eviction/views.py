# SPDX-License-Identifier: Apache-2.0
"""Views of requests with given keys and weights, and what policies answer to them."""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.eviction.policies.contract import (
    Attention,
    Eviction,
    NoAttention,
    RequestView,
)


class GivenKeys:
    """Keys of held positions, ``[layers, held, heads, head_dim]``."""

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys
        self.layers = range(len(keys))

    def cached_at(self) -> torch.Tensor:
        return torch.arange(self._keys.shape[1])

    def stored(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def unrotated(self, layer: int) -> torch.Tensor:
        # Some other keys, so that it shows which were asked for.
        return self._keys[layer].flip(0)

    def token_scores(
        self, score: Callable[[torch.Tensor], torch.Tensor], *, unrotated: bool = False
    ) -> np.ndarray:
        read = self.unrotated if unrotated else self.stored
        return torch.stack([score(read(i)) for i in self.layers]).mean(dim=(0, 2)).double().numpy()


class GivenWeights:
    """Weights of held positions by query, ``[queries, held]``, the newest query last."""

    def __init__(self, weights: np.ndarray) -> None:
        self._weights = weights

    def latest(self, queries: int) -> np.ndarray:
        return np.asarray(self._weights[-queries:].mean(axis=0))

    def total(self) -> np.ndarray:
        return np.asarray(self._weights.sum(axis=0))


def view(
    written: int,
    weights: np.ndarray | None = None,
    *,
    prompt: int | None = None,
    owned: int = 0,
    page: int = 1,
    gone: Iterable[int] = (),
    keys: torch.Tensor | None = None,
    seed: int = 7,
    shared: Iterable[tuple[int, int, int]] = (),
) -> RequestView:
    """``prompt``: None: as much as is not the request's own."""
    held = np.setdiff1d(np.arange(written), np.fromiter(gone, dtype=np.int64))
    given = GivenKeys(torch.zeros(1, len(held), 1, 2) if keys is None else keys)
    row = HostRow()
    row.locate(0, range(1, written + 1))
    for dst, src, length in shared:
        row.read(dst, src, length, row, [])
    attention: Attention = NoAttention()
    if weights is not None:
        assert weights.shape[1] == len(held)
        attention = GivenWeights(weights)
    prompt = owned if prompt is None else prompt
    aliases = row.first_readers(held)
    return RequestView(prompt, written, owned, page, held, aliases, seed, given, attention)


def positions(evictions: Iterable[Eviction]) -> list[int]:
    return [at for evict in evictions for at in range(evict.start, evict.end)]
