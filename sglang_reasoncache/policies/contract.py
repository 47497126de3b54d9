# SPDX-License-Identifier: Apache-2.0
"""What a policy sees and what it answers. Neither SGLang nor slots appear here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sglang_reasoncache.sharing.decision import Drop

if TYPE_CHECKING:
    import torch

#: What a policy may name in ``needs``.
KEYS = "keys"
UNROTATED_KEYS = "unrotated keys"


class OptionError(ValueError):
    """An option of a policy is out of bounds: ``<key> of a policy must be <bound>``."""

    def __init__(self, key: str, bound: str) -> None:
        super().__init__(f"{key} {bound}")
        self.key, self.bound = key, bound


class Keys(Protocol):
    """Keys of the positions a request holds; entry i belongs to ``RequestView.held[i]``.

    Read from the pool when asked for, one layer at a time. Under tensor parallelism a rank
    has its own heads; :meth:`token_scores` covers all of them.
    """

    @property
    def layers(self) -> range: ...

    def home(self) -> torch.Tensor:
        """int64 ``[held]``: the position each key was rotated for; another one than where it
        is used if the slot is shared. Meaningful where keys can be un-rotated."""

    def stored(self, layer: int) -> torch.Tensor:
        """fp32 ``[held, heads, head_dim]``, as cached: rotated for their home."""

    def unrotated(self, layer: int) -> torch.Tensor:
        """fp32 ``[held, heads, head_dim]``, without rotary embedding."""

    def token_scores(
        self, score: Callable[[torch.Tensor], torch.Tensor], *, unrotated: bool = False
    ) -> np.ndarray:
        """float64 ``[held]``: ``score`` averaged over all layers and KV heads, of all ranks.

        ``score`` maps a layer's keys ``[held, heads, head_dim]`` to ``[held, heads]``.
        Every rank must call this alike.
        """


@dataclass(frozen=True)
class RequestView:
    """One request between two forwards.

    Attributes:
        prompt: Length of the prompt.
        written: Positions ``[0, written)`` have their KV in the pool or were dropped.
        owned: First position that may be dropped. Everything before it belongs to the
            prefix tree or is prompt (but for its last part of a page), and stays. With a
            policy's ``prompt`` only the tree's part does.
        page: Positions per page; only whole pages can be dropped.
        held: int64, ascending: written positions that were not dropped.
        seed: A number of the prompt's tokens, the same for the same prompt.
        keys: On demand; only for a policy that ``needs`` them.
    """

    prompt: int
    written: int
    owned: int
    page: int
    held: np.ndarray
    seed: int
    keys: Keys

    def candidates(self, recent: int = 1) -> np.ndarray:
        """Positions that may be dropped, ascending, in whole pages: all that the request owns
        and holds, less the ``recent`` newest ones (at least 1)."""
        end = (self.written - max(recent, 1)) // self.page * self.page
        low, high = np.searchsorted(self.held, (self.owned, end))
        return self.held[low:high]


class Policy(Protocol):
    """An evictor: a frozen dataclass, its fields the options of ``--reasoncache-policy``.

    It keeps nothing between calls: what it decides follows from the view, so that
    tensor-parallel ranks decide alike. ``__post_init__`` raises :class:`OptionError`.

    Three more attributes count if there are any: ``prompt`` (bool), ``when`` and ``until``
    (shares of the pool); see :class:`~sglang_reasoncache.policies.evictor.Evictor`.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Of :data:`KEYS` and :data:`UNROTATED_KEYS`."""

    @property
    def slack(self) -> int:
        """Positions a request writes at least between two decisions."""

    def excess(self, written: int, held: int) -> int:
        """How many of ``held`` positions are too many now. Asked often; 0 asks no further."""

    def drops(self, view: RequestView, excess: int) -> Iterable[Drop]:
        """Runs of positions to give up, some ``excess`` of them together."""
