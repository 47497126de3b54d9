# SPDX-License-Identifier: Apache-2.0
"""Types that an evicting policy reads. They contain no types of SGLang and no slot ids."""

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
    """Keys and newest queries of one attention layer, read from the device on demand. A rank sees only its own
    heads. A key's *cached position* is the one it was rotated for. ``held`` in a shape: ``len(View.held)``."""

    @property
    def rotation(self) -> KeyRotation | None:
        """The rotation of the layer's keys; None if cached positions are not recorded."""

    def stored(self) -> torch.Tensor:
        """fp32 ``[held, kv_heads, head_dim]``: keys as cached, rotated for their cached positions."""

    def used(self) -> torch.Tensor:
        """fp32 ``[held, kv_heads, head_dim]``: keys as attention uses them, rotated for the held positions."""

    def queries(
        self, first: int, end: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries of the positions from ``first`` on, as far as they were kept.

        ``end``: the position behind the last query to read. If None, the forward in flight has the last query.

        Returns the queries after rotary embedding, fp32 ``[queries, heads, head_dim]``; their positions, int64
        ``[queries]``; whether a query was kept for each position, bool ``[queries]``.
        """

    def weights(self, first: int, end: int | None = None) -> torch.Tensor:
        """fp32 ``[heads, held]``: softmax weight of each held position, summed over the queries that
        :meth:`queries` returns. A query gives no weight to later positions."""


@dataclass(frozen=True)
class View:
    """One request between two forwards.

    Attributes:
        prompt: Tokens of the prompt.
        written: Positions ``[0, written)`` have their KV in the pool, or were evicted.
        owned: First position that may be evicted. Earlier positions belong to the prefix tree or, without
            the option ``prompt``, to whole pages of the prompt.
        page: Positions of a page; only whole pages can be evicted.
        held: int64 ``[held]``, ascending: written positions that were not evicted.
        first_readers: int64 ``[held]``: the lowest held position with the same slot.
        seed: A number that is the same for the same prompt.
        layers: All attention layers of this rank.
        earlier: fp32 ``[held]``: the last scores of a policy with running totals, 0 for positions written
            since. None if the policy has not scored yet.
        seen: The queries of positions ``[0, seen)`` are counted in ``earlier``.
    """

    prompt: int
    written: int
    owned: int
    page: int
    held: np.ndarray
    first_readers: np.ndarray
    seed: int
    layers: Sequence[Layer] = ()
    earlier: torch.Tensor | None = None
    seen: int = 0

    def candidates(self, recent: int = 1) -> np.ndarray:
        """int64, ascending: positions that may be evicted, in whole pages.

        All are held, and none is before ``owned``. The ``recent`` newest positions are left out, at least 1,
        because SGLang reads the newest position's slot to place the next slot. If a slot also belongs to a
        position that stays, its other positions are left out, because evicting them frees nothing.
        """
        end = (self.written - max(recent, 1)) // self.page * self.page
        low, high = np.searchsorted(self.held, (self.owned, end))
        stays = np.concatenate((self.first_readers[:low], self.first_readers[high:]))
        return self.held[low:high][~np.isin(self.first_readers[low:high], stays)]

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
