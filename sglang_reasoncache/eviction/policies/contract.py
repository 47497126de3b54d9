# SPDX-License-Identifier: Apache-2.0
"""What a policy sees and what it answers. Neither SGLang nor its slots' ids appear here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

#: What a policy may name in ``needs``.
KEYS = "keys"
UNROTATED_KEYS = "unrotated keys"
ATTENTION = "attention"


class StatisticsNeeds(NamedTuple):
    """Which weights a policy that needs :data:`ATTENTION` reads."""

    latest: int = 0  # newest queries whose weights are kept apart, for ``Attention.latest``
    total: bool = False  # sums over all queries of the response, for ``Attention.total``
    prompt: int = 0  # queries at the end of a prompt that count as well


@dataclass(frozen=True)
class Eviction:
    """Give up positions ``[start, start + length)`` of a request; others keep their numbers."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Keys(Protocol):
    """Keys of ``RequestView.held``, read from the pool on demand; a rank has its own heads."""

    @property
    def layers(self) -> range: ...

    def cached_at(self) -> torch.Tensor:
        """int64 ``[held]``: the position each key was rotated for, where keys can be un-rotated."""

    def stored(self, layer: int) -> torch.Tensor:
        """fp32 ``[held, heads, head_dim]``, as cached: rotated for their cached positions."""

    def unrotated(self, layer: int) -> torch.Tensor:
        """fp32 ``[held, heads, head_dim]``, without rotary embedding."""

    def token_scores(
        self, score: Callable[[torch.Tensor], torch.Tensor], *, unrotated: bool = False
    ) -> np.ndarray:
        """float64 ``[held]``: ``score`` averaged over all layers and KV heads, of all ranks, each
        of which must call this. It maps keys ``[held, heads, head_dim]`` to ``[held, heads]``."""


class Attention(Protocol):
    """Softmax weights that ``RequestView.held`` got, averaged over the query heads of all
    layers and ranks. Every rank must read alike."""

    def latest(self, queries: int) -> np.ndarray:
        """float64 ``[held]``: mean over the ``queries`` newest ones, as far as they were
        counted; 0 for a position behind a query."""

    def total(self) -> np.ndarray:
        """float64 ``[held]``: sum over all queries of the response so far, and the last
        ``StatisticsNeeds.prompt`` ones of what was computed before it."""


class NoAttention:
    """Of a policy that does not need it."""

    def latest(self, queries: int = 0) -> np.ndarray:
        raise LookupError(f"the policy's needs do not name {ATTENTION!r}")

    total = latest


@dataclass(frozen=True)
class RequestView:
    """One request between two forwards."""

    prompt: int  # length of the prompt
    written: int  # positions ``[0, written)`` have their KV in the pool or were evicted
    #: First position that may be evicted. What is before it belongs to the prefix tree or, without
    #: a policy's ``prompt``, is prompt (but for its last part of a page).
    owned: int
    page: int  # positions per page; only whole pages can be evicted
    held: np.ndarray  # int64, ascending: written positions that were not evicted; read-only
    slot_aliases: np.ndarray  # int64 ``[held]``, equal where two share a slot; read-only
    seed: int  # the same for the same prompt
    keys: Keys  # on demand; only for a policy that ``needs`` them
    attention: Attention = field(default_factory=NoAttention)  # likewise

    def __post_init__(self) -> None:
        # What one policy does to it must not show in what it reads of keys and weights.
        for name in ("held", "slot_aliases"):
            array = getattr(self, name).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def candidates(self, recent: int = 1) -> np.ndarray:
        """Positions that may be evicted, ascending, in whole pages: all that the request owns
        and holds, less the ``recent`` newest ones (at least 1), and less those that have a slot
        with one that stays, where nothing would come back. The caller's own array."""
        end = (self.written - max(recent, 1)) // self.page * self.page
        low, high = np.searchsorted(self.held, (self.owned, end))
        stays = np.concatenate((self.slot_aliases[:low], self.slot_aliases[high:]))
        return self.held[low:high][~np.isin(self.slot_aliases[low:high], stays)]


class Policy(Protocol):
    """An evictor: a frozen dataclass, its fields the options of ``--reasoncache-policy``.

    What it decides follows from the view alone, so that tensor-parallel ranks decide alike.
    ``__post_init__`` raises ``policy_options.OptionError``. ``prompt``, ``when`` and ``until``
    count if there are any, see ``evictor.Evictor``.
    """

    @property
    def needs(self) -> frozenset[str]:
        """Of :data:`KEYS`, :data:`UNROTATED_KEYS` and :data:`ATTENTION`; the last one takes an
        attribute ``statistics_needs``, a :class:`StatisticsNeeds`."""

    @property
    def slack(self) -> int:
        """Positions a request writes at least between two decisions."""

    def excess(self, written: int, slots: int) -> int:
        """How many of the ``slots`` of ``written`` positions, less what was evicted or shared,
        are too many now. Called often; 0 ends the decision."""

    def evict(self, view: RequestView, excess: int) -> Iterable[Eviction]:
        """Runs of positions to give up, of some ``excess`` slots together. A slot comes back with
        the last position that has it."""


class NamedPolicy(NamedTuple):
    """A configured evictor and its name in ``--reasoncache-policy``."""

    name: str
    policy: Policy


def needs_of(evictors: Iterable[NamedPolicy]) -> StatisticsNeeds | None:
    """What all ``evictors`` together read; None: nothing."""
    policies: list[Any] = [policy for _, policy in evictors if ATTENTION in policy.needs]
    if not policies:
        return None
    latest, total, prompt = zip(*(policy.statistics_needs for policy in policies), strict=True)
    return StatisticsNeeds(max(latest), any(total), max(prompt))
