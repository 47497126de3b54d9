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
    """Which weights a policy that needs :data:`ATTENTION` reads.

    Attributes:
        latest: Newest queries whose weights are kept apart, for ``Attention.latest``.
        total: Sums over all queries of the response are kept, for ``Attention.total``.
        prompt: Queries at the end of a prompt that count as well.
    """

    latest: int = 0
    total: bool = False
    prompt: int = 0


@dataclass(frozen=True)
class Eviction:
    """Give up positions ``[start, start + length)`` of a request.

    Positions are logical, as a block's are; those behind keep their numbers.
    """

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class Keys(Protocol):
    """Keys of the positions a request holds; entry i belongs to ``RequestView.held[i]``.

    Read from the pool on demand, one layer at a time. Under tensor parallelism a rank
    has its own heads; :meth:`token_scores` covers all of them.
    """

    @property
    def layers(self) -> range: ...

    def cached_at(self) -> torch.Tensor:
        """int64 ``[held]``: the position each key was rotated for, which is not where it is used
        if the slot is shared. Meaningful where keys can be un-rotated."""

    def stored(self, layer: int) -> torch.Tensor:
        """fp32 ``[held, heads, head_dim]``, as cached: rotated for their cached positions."""

    def unrotated(self, layer: int) -> torch.Tensor:
        """fp32 ``[held, heads, head_dim]``, without rotary embedding."""

    def token_scores(
        self, score: Callable[[torch.Tensor], torch.Tensor], *, unrotated: bool = False
    ) -> np.ndarray:
        """float64 ``[held]``: ``score`` averaged over all layers and KV heads, of all ranks.

        ``score`` maps a layer's keys ``[held, heads, head_dim]`` to ``[held, heads]``.
        Every rank must call this alike.
        """


class Attention(Protocol):
    """Softmax weights that the positions of a request got, averaged over the query heads of all
    layers and ranks; entry i belongs to ``RequestView.held[i]``. Every rank must
    read alike.
    """

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
    """One request between two forwards.

    Attributes:
        prompt: Length of the prompt.
        written: Positions ``[0, written)`` have their KV in the pool or were evicted.
        owned: First position that may be evicted. Everything before it belongs to the
            prefix tree or is prompt (but for its last part of a page), and stays. With a
            policy's ``prompt`` only the tree's part does.
        page: Positions per page; only whole pages can be evicted.
        held: int64, ascending: written positions that were not evicted. Read-only.
        slot_aliases: int64 ``[held]``, a number per slot: positions with the same number share
            one slot. Read-only.
        seed: A number of the prompt's tokens, the same for the same prompt.
        keys: On demand; only for a policy that ``needs`` them.
        attention: Likewise.
    """

    prompt: int
    written: int
    owned: int
    page: int
    held: np.ndarray
    slot_aliases: np.ndarray
    seed: int
    keys: Keys
    attention: Attention = field(default_factory=NoAttention)

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

    It keeps nothing between calls: what it decides follows from the view, so that
    tensor-parallel ranks decide alike. ``__post_init__`` raises
    :class:`~sglang_reasoncache.policy_options.OptionError`.

    Three more attributes count if there are any: ``prompt`` (bool), ``when`` and ``until``
    (shares of the pool); see :class:`~sglang_reasoncache.eviction.policies.evictor.Evictor`.
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
