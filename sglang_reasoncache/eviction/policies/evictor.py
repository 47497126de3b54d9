# SPDX-License-Identifier: Apache-2.0
"""The base class of evicting policies: the budget, when a policy acts, and which positions it may evict."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch

    from sglang_reasoncache.eviction.policies.contract import View

#: A request writes at most this many positions between two polls. A poll comes every fourth decode step.
BETWEEN_POLLS = 8
#: Values of ``when``.
ALWAYS = "always"
SHORT = "short"


class OptionError(ValueError):
    """The value of a policy's option is not allowed. ``bound`` completes the sentence "``key`` must be ..."."""

    def __init__(self, key: str, bound: str) -> None:
        super().__init__(f"{key} {bound}")
        self.key = key
        self.bound = bound


def bounded(default: float | None, low: float, high: float) -> Any:
    """A dataclass field of a policy. Its value must be None or lie in ``[low, high]``."""
    return dataclasses.field(default=default, metadata={"bounds": (low, high)})


def check_bounds(policy: Any) -> None:
    """Raises OptionError if a :func:`bounded` option of ``policy``, a dataclass, is out of its bounds."""
    for option in dataclasses.fields(policy):
        value = getattr(policy, option.name)
        bounds = option.metadata.get("bounds")
        if bounds and value is not None and not bounds[0] <= value <= bounds[1]:
            raise OptionError(option.name, "between {} and {}".format(*bounds))


def one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raises OptionError if the option ``key`` has a ``value`` that is not among those ``known``."""
    if value not in known:
        raise OptionError(key, f"one of {', '.join(known)}")


@dataclass(frozen=True)
class Evictor:
    """A policy scores positions (:meth:`scores`). Those with the lowest scores are evicted to meet the budget.

    A policy keeps no state: scores follow from its options and the ``View``, which has the running totals of a
    policy that ``accumulates``. The fields of a policy are options
    of ``--reasoncache-policy``. Exactly one of ``budget`` and ``share`` must be given.

    Attributes:
        budget: Slots that a request may take, prompt included. Positions that share a slot count once.
        share: The budget as a fraction of the number of positions that the request has so far.
        slack: By how many slots a request may exceed the budget before the policy evicts, at most down to it.
        recent: Number of newest positions that stay, even if the request then exceeds its budget. If the prompt
            alone fills the budget, only these response positions stay. Without them the output would be noise.
        prompt: Whether positions of the prompt may be evicted. If so, a poll also follows each prefill chunk,
            and the request enters the prefix tree only when it finishes, up to its first evicted position.
        when: ``always``: at polls, every fourth decode step. ``short``: only if SGLang would retract a request.

    Raises OptionError for an option whose value is not allowed.
    """

    budget: int | None = bounded(None, 1, 10_000_000)
    share: float | None = None
    slack: int = bounded(32, 0, 65_536)
    recent: int = bounded(32, 1, 65_536)
    prompt: bool = False
    when: str = ALWAYS

    #: Whether scores are running totals. If so, each kept query is counted before a newer one overwrites it.
    accumulates: ClassVar[bool] = False
    #: Whether the policy undoes rotary embedding. If so, it needs ``--reasoncache-positions corrected``.
    unrotates: ClassVar[bool] = False

    @property
    def queries(self) -> int:
        """Number of newest queries of a request that the policy reads; 0 if it reads none. With
        ``accumulates`` at least ``BETWEEN_POLLS``."""
        return 0

    def __post_init__(self) -> None:
        check_bounds(self)
        if (self.budget is None) == (self.share is None):
            raise OptionError("budget or share", "given, one of the two")
        if self.share is not None and not 0 < self.share < 1:
            raise OptionError("share", "above 0 and below 1")
        one_of("when", self.when, (ALWAYS, SHORT))
        if self.accumulates and self.queries < BETWEEN_POLLS:
            bound = f"at least {BETWEEN_POLLS}, because running totals count queries once a poll"
            raise OptionError("queries", f"{bound}, not {self.queries}")

    def allowed(self, positions: int) -> int:
        """Slots that a request with this number of ``positions`` may take."""
        if self.share is not None:
            return math.ceil(self.share * positions)
        assert self.budget is not None, "one of the two is given"
        return self.budget

    def excess(self, view: View, slots: int) -> int:
        """How many of the request's ``slots`` are beyond the budget."""
        return max(slots - self.allowed(view.written), 0)

    def candidates(self, view: View) -> np.ndarray:
        """Positions that may be evicted: int64 ``[n]``, ascending. See :meth:`View.candidates`."""
        return view.candidates(self.recent)

    def scores(self, view: View) -> torch.Tensor:
        """The score of each held position: float ``[held]`` on any device. Positions with the lowest scores are
        evicted first, the oldest first among equal scores, and those with NaN last. Each tensor-parallel rank
        scores with its own heads, and the ranks' scores are added up."""
        raise NotImplementedError


def lowest(
    scores: np.ndarray, first: np.ndarray, worth: np.ndarray, page: int, count: int
) -> np.ndarray:
    """Choose which positions of a request to evict, in whole pages: bool ``[positions]``.

    Args:
        scores: float ``[positions]``. A page's score is the mean of its positions' scores.
        first: int ``[positions]``, see :attr:`View.first_readers`. Positions that share a slot, and linked
            pages, are evicted together, and the highest of their scores counts.
        worth: int ``[positions]``, see :attr:`View.worth`.
        page: Number of positions in a page.
        count: Number of slots to free, rounded up to whole pages.
    """
    by_page = scores.astype(np.float64).reshape(-1, page).mean(axis=1)
    _, index, group_of = np.unique(first[::page], return_index=True, return_inverse=True)
    highest = np.full(len(index), -np.inf)
    np.maximum.at(highest, group_of, np.where(np.isnan(by_page), np.inf, by_page))
    order = np.argsort(highest, kind="stable")
    freed = np.cumsum(worth[::page][index][order])
    chosen = order[: np.searchsorted(freed, count) + 1]
    return np.isin(group_of, chosen).repeat(page)


def runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """Split ascending ``positions`` into runs of consecutive numbers, each as ``(start, length)``."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(positions, breaks)]
