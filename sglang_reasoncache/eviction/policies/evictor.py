# SPDX-License-Identifier: Apache-2.0
"""What evicting policies share: a budget and slack, when to keep to it, picking by score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_reasoncache.eviction.policies.contract import Eviction, RequestView
from sglang_reasoncache.policy_options import OptionError, between

#: Of the pool, between where a policy with ``when`` begins and where it stops.
HYSTERESIS = 0.05


def bounded(default: float, low: float, high: float) -> Any:
    """A field of a policy whose value must lie in ``[low, high]``."""
    return dataclasses.field(default=default, metadata={"bounds": (low, high)})


@dataclass(frozen=True)
class Evictor:
    """Options of every evicting policy; exactly one of ``budget`` and ``share`` must be given.

    Attributes:
        budget: Slots a request takes, prompt included; positions that share one count once.
        share: The same as a share of its positions so far.
        slack: Slots above that before the policy acts; it then goes down to the budget.
        recent: Newest positions that stay, even where the budget is not met then: the prompt
            alone may exceed it, and a response that forgets every word at once is noise.
        prompt: Positions of the prompt may go too, chunk by chunk while it is computed. It
            is then published when the request finishes, up to the first evicted position.
        when: Act only once more than this share of the pool's slots is in use; 0: always.
        until: Having begun, go on until no more than this share is; ``when`` less 0.05.
    """

    budget: int | None = None
    share: float | None = None
    slack: int = 32
    recent: int = 32
    prompt: bool = False
    when: float = 0.0
    until: float | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

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
        if not 0 <= self.when < 1:
            raise OptionError("when", "at least 0 and below 1")
        if self.until is None:
            object.__setattr__(self, "until", max(self.when - HYSTERESIS, 0.0))
        elif not 0 <= self.until <= self.when:
            raise OptionError("until", f"between 0 and when ({self.when})")

    def allowed(self, positions: int) -> int:
        """Slots that as many positions may take."""
        if self.share is not None:
            return math.ceil(self.share * positions)
        assert self.budget is not None, "one of the two is given"
        return self.budget

    def excess(self, written: int, slots: int) -> int:
        above = slots - self.allowed(written)
        return above if above > self.slack else 0


@dataclass(frozen=True)
class ScoringEvictor(Evictor):
    """Gives up the candidates of highest score."""

    def candidates(self, view: RequestView) -> np.ndarray:
        """int64, positions that may go; see :meth:`RequestView.candidates`."""
        return view.candidates(self.recent)

    def scores(self, view: RequestView) -> np.ndarray:
        """float ``[held]``; computed only where there are candidates."""
        raise NotImplementedError

    def evict(self, view: RequestView, excess: int) -> Iterable[Eviction]:
        """Older ones go first among equals; ``excess`` is rounded up to whole pages, which have
        the mean score of their positions. Positions that share a slot go together, once the one
        of them that is wanted most would."""
        page, candidates = view.page, self.candidates(view)
        if not len(candidates):
            return []
        at = np.searchsorted(view.held, candidates)
        by_page = self.scores(view)[at].reshape(-1, page).mean(axis=1)
        slots, slot_of = np.unique(view.slot_aliases[at[::page]], return_inverse=True)
        least = np.full(len(slots), np.inf)
        with np.errstate(invalid="ignore"):  # No number: such a page stays longest.
            np.minimum.at(least, slot_of, by_page)
        chosen = np.argsort(-least, kind="stable")[: math.ceil(excess / page)]
        return runs(candidates.reshape(-1, page)[np.isin(slot_of, chosen)].ravel())


def pooled(scores: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    """``max`` or ``avg`` of the ``kernel`` scores around each, so that what is kept hangs
    together; beyond the ends lie zeros. An even ``kernel`` reaches one further back than forth.

    ``scores``: float ``[held]``, none below 0, neighbours in the cache side by side.
    """
    if not len(scores):
        return scores
    sides = (kernel // 2, kernel - 1 - kernel // 2)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(scores, sides), kernel)
    return windows.max(axis=1) if kind == "max" else windows.mean(axis=1)


def runs(positions: np.ndarray) -> list[Eviction]:
    """Ascending positions as runs."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [Eviction(int(part[0]), len(part)) for part in np.split(positions, breaks)]
