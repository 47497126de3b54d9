# SPDX-License-Identifier: Apache-2.0
"""Types that evicting policies work with. These types contain no SGLang types and no slot ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from sglang_reasoncache.eviction.policies.evictor import Evictor
    from sglang_reasoncache.kernels.rotation import KeyRotation


class Layer(Protocol):
    """One request's keys and newest queries in one attention layer, read from the device on demand. A
    tensor-parallel rank sees only its own heads. A key's *cached position* is the position for which the cached
    key was rotated. In shapes, ``held`` stands for ``len(View.held)``."""

    @property
    def rotation(self) -> KeyRotation | None:
        """The rotation of the layer's keys; None if cached positions are not recorded."""

    def stored(self) -> torch.Tensor:
        """fp32 ``[held, kv_heads, head_dim]``: keys as cached, rotated for their cached positions."""

    def used(self) -> torch.Tensor:
        """fp32 ``[held, kv_heads, head_dim]``: the keys that attention uses, rotated for the positions in
        ``View.held``, or as cached if :attr:`rotation` is None."""

    def queries(
        self, first: int, end: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of positions ``[first, end)``, as far back as the buffer of newest queries reaches. If
        ``end`` is None, the last query is that of the forward pass in flight.

        Returns three tensors: the queries after rotary embedding, fp32 ``[queries, heads, head_dim]``; their
        positions, int64 ``[queries]``; whether each query was kept, bool ``[queries]``."""

    def weights(
        self, first: int, end: int | None = None, newest: int | None = None
    ) -> torch.Tensor:
        """fp32 ``[heads, held]``: softmax weight of each held position, summed over the queries that
        :meth:`queries` returns and that were kept, or over the ``newest`` of these. A query gives no weight to
        later positions. Each call reads and rotates all held keys of the layer."""


@dataclass(frozen=True)
class View:
    """What policies see of one request between two forward passes.

    Attributes:
        prompt: Number of tokens in the prompt.
        written: Positions ``[0, written)`` have their KV in the pool, or were evicted.
        owned: First position that may be evicted. Earlier positions belong to the prefix tree or, without
            the option ``prompt``, to pages that hold only prompt tokens.
        page: Number of positions in a page; only whole pages can be evicted.
        held: int64 ``[held]``, ascending: written positions that were not evicted.
        first_readers: int64 ``[held]``: for each held position, the lowest held position with the same slot. At
            page sizes above 1: the position at the same place of the lowest page that is evicted with its page,
            because they name slots of the same pages.
        worth: int64 ``[held]``: how many slots all positions with the same first reader name together.
        seed: A number computed from the prompt, equal for equal prompts.
        layers: All attention layers of this rank; empty except in :meth:`Evictor.scores`.
        earlier: fp32 ``[held]``: the last scores of a policy whose scores are running totals; 0 for positions
            written since then. None for other policies, and before the first scoring.
        seen: Queries from position ``seen`` on are not counted in ``earlier`` yet.
    """

    prompt: int
    written: int
    owned: int
    page: int
    held: np.ndarray
    first_readers: np.ndarray
    worth: np.ndarray
    seed: int
    layers: Sequence[Layer] = ()
    earlier: torch.Tensor | None = None
    seen: int = 0

    @property
    def evictable(self) -> tuple[int, int]:
        """The first position that may be evicted, and the first behind them that may not."""
        return self.owned, self._end(1)

    def _end(self, recent: int) -> int:
        """Where the newest ``recent`` positions, at least one, begin, in whole pages."""
        return (self.written - max(recent, 1)) // self.page * self.page

    def candidates(self, recent: int = 1) -> np.ndarray:
        """int64, ascending: positions that may be evicted, in whole pages.

        All are in ``held``, and none is before ``owned``. The newest ``recent`` positions are left out, and the
        newest one always is, because SGLang reads its slot when it allocates the next slot. A position that
        shares its slot with a position that stays is left out, because evicting it would free nothing.
        """
        low, high = np.searchsorted(self.held, (self.owned, self._end(recent)))
        named = np.zeros(len(self.held), dtype=bool)
        named[low:high] = True
        return self.held[whole(named, self.first_readers, self.page)]

    def mean(self, score: Callable[[Layer], torch.Tensor]) -> torch.Tensor:
        """fp32 ``[held]``: mean of ``score`` over this rank's layers and heads. ``score`` maps a layer to
        ``[heads, held]``."""
        total = score(self.layers[0]).mean(dim=0)
        for layer in self.layers[1:]:
            total += score(layer).mean(dim=0)
        return total / len(self.layers)


class NamedPolicy(NamedTuple):
    """A configured policy and its name in ``--reasoncache-policy``."""

    name: str
    policy: Evictor


def whole(named: np.ndarray, first: np.ndarray, page: int) -> np.ndarray:
    """Which positions can be evicted if only ``named`` ones may go: those of pages whose readers are all named.

    Args:
        named: bool ``[held]``.
        first: int ``[held]``, see :attr:`View.first_readers`.
        page: Number of positions in a page.

    Returns:
        bool ``[held]``.
    """
    # By page, because the newest page, which stays, has no positions yet at some places.
    group = first // page
    return named & ~np.isin(group, group[~named])
