# SPDX-License-Identifier: Apache-2.0
"""Views of requests with given keys and weights, and the positions that policies evict from them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.eviction.row_state import Decision
from sglang_reasoncache.kernels.rotation import KeyRotation


@dataclass
class GivenLayer:
    """``keys``: ``[held, heads, dim]``. ``given``: weights ``[queries, held]``; the last query is that of
    position ``written - 1``."""

    keys: torch.Tensor
    given: torch.Tensor | None
    written: int
    rotation: KeyRotation | None = None

    def stored(self) -> torch.Tensor:
        return self.keys

    def used(self) -> torch.Tensor:
        return self.keys

    def queries(self, first: int, end: int | None = None) -> Any:
        raise NotImplementedError

    def weights(self, first: int, end: int | None = None) -> torch.Tensor:
        assert self.given is not None, "a policy that reads no queries got some"
        return self.given[-(self.written - max(first, 0)) :].sum(dim=0)[None]


def view(
    written: int, weights: np.ndarray | None = None, *, prompt: int | None = None, owned: int = 0,
    page: int = 1, gone: Iterable[int] = (), keys: torch.Tensor | None = None, seed: int = 7,
    shared: Iterable[tuple[int, int, int]] = (),
) -> View:  # fmt: skip
    """``prompt``: its length, by default ``owned``. ``keys``: ``[layers, held, heads, dim]``."""
    held = np.setdiff1d(np.arange(written), np.fromiter(gone, dtype=np.int64))
    keys = torch.zeros(1, len(held), 1, 2) if keys is None else keys
    row = HostRow()
    row.locate(0, range(1, written + 1))
    for dst, src, length in shared:
        row.read(dst, src, length, row, [])
    given = None if weights is None else torch.from_numpy(weights).float()
    assert given is None or given.shape[1] == len(held)
    return View(
        prompt=owned if prompt is None else prompt, written=written, owned=owned, page=page,
        held=held, first_readers=row.first_readers(held), seed=seed,
        layers=[GivenLayer(of_layer, given, written) for of_layer in keys],
    )  # fmt: skip


def evict(policy: Evictor, now: View, slots: int, count: int | None = None) -> list[int]:
    """Positions that the policy evicts from a request with ``slots`` slots; ``count``: how many slots
    to give up, None for those beyond the budget."""
    excess = policy.excess(now, slots) if count is None else count
    candidates = policy.candidates(now)
    if excess <= 0 or not len(candidates):
        return []
    found = Decision(now, candidates, policy.scores(now), excess).positions(Ranks())
    return [int(at) for at in found]
