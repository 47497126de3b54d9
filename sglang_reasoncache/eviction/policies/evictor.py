# SPDX-License-Identifier: Apache-2.0
"""The base of every evicting policy: its budget, when it acts, which positions may go."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sglang_reasoncache.policy_options import OptionError, between, one_of

if TYPE_CHECKING:
    import torch

    from sglang_reasoncache.eviction.policies.contract import View

#: Values of ``when``.
ALWAYS, SHORT = "always", "short"


def bounded(default: float, low: float, high: float) -> Any:
    """A field of a policy whose value must lie in ``[low, high]``."""
    return dataclasses.field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True)
class Evictor:
    """A policy says :meth:`scores`; the positions of lowest score go until the budget is met.

    It keeps no state: what it scores follows from its options and the view. Fields are the options
    of ``--reasoncache-policy``; exactly one of ``budget`` and ``share`` must be given.

    Attributes:
        budget: Slots a request takes, prompt included; positions that share one count once.
        share: The same as a share of its positions so far.
        slack: Slots above that before the policy acts; it then goes down to the budget.
        recent: Newest positions that stay, even where the budget is not met then: the prompt
            alone may exceed it, and a response that forgets every word at once is noise.
        prompt: Positions of the prompt may go too, chunk by chunk while it is computed. It
            is then published when the request finishes, up to the first evicted position.
        when: ``always``, or ``short``: only when SGLang would retract a request for want of slots.

    Raises OptionError for a value out of bounds.
    """

    budget: int | None = None
    share: float | None = None
    slack: int = 32
    recent: int = 32
    prompt: bool = False
    when: str = ALWAYS

    #: Scores go on from those of the last time, and are made whenever a window of queries is full.
    accumulates: ClassVar[bool] = False

    @property
    def queries(self) -> int:
        """Newest queries of a request that the policy reads; 0: none."""
        return 0

    @property
    def unrotates(self) -> bool:
        """Whether it reads keys or queries before rotary embedding."""
        return False

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):
            if bounds := option.metadata.get("bounds"):
                between(option.name, getattr(self, option.name), *bounds)
        if (self.budget is None) == (self.share is None):
            raise OptionError("budget or share", "given, one of the two")
        if self.budget is not None:
            between("budget", self.budget, 1, 10_000_000)
        if self.share is not None and not 0 < self.share < 1:
            raise OptionError("share", "above 0 and below 1")
        between("slack", self.slack, 0, 65_536)
        between("recent", self.recent, 1, 65_536)
        one_of("when", self.when, (ALWAYS, SHORT))

    def allowed(self, positions: int) -> int:
        """Slots that as many positions may take."""
        if self.share is not None:
            return math.ceil(self.share * positions)
        assert self.budget is not None, "one of the two is given"
        return self.budget

    def excess(self, view: View, slots: int) -> int:
        """How many of the request's ``slots`` are beyond the budget."""
        return max(slots - self.allowed(view.written), 0)

    def candidates(self, view: View) -> np.ndarray:
        """int64, positions that may go; see :meth:`View.candidates`."""
        return view.candidates(self.recent)

    def scores(self, view: View) -> torch.Tensor:
        """float ``[held]`` on any device: how much each position is worth. The lowest go, of equals
        the oldest, and where there is no number (NaN) last. Ranks add up theirs, of their own
        heads."""
        raise NotImplementedError


def lowest(scores: np.ndarray, slots: np.ndarray, page: int, count: int) -> np.ndarray:
    """bool ``[positions]``: which of some positions, whole pages of a row, go.

    Args:
        scores: float ``[positions]``; a page is worth the mean of its positions.
        slots: int ``[positions]``, equal where two share a slot. These go together, and are worth
            the most of them.
        page: Positions of a page.
        count: Slots that shall go, rounded up to whole pages.
    """
    by_page = scores.astype(np.float64).reshape(-1, page).mean(axis=1)
    known, slot_of = np.unique(slots[::page], return_inverse=True)
    worth = np.full(len(known), -np.inf)
    np.maximum.at(worth, slot_of, np.where(np.isnan(by_page), np.inf, by_page))
    chosen = np.argsort(worth, kind="stable")[: math.ceil(count / page)]
    return np.isin(slot_of, chosen).repeat(page)


def runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """Ascending positions as runs of start and length."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), len(part)) for part in np.split(positions, breaks)]
