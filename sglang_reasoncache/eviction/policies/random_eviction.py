# SPDX-License-Identifier: Apache-2.0
"""Random eviction: what a budget costs when nothing is known about the positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_reasoncache.eviction.policies.contract import RequestView
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor, bounded


@dataclass(frozen=True)
class RandomEviction(ScoringEvictor):
    """Each slot draws a number once, from ``seed`` and the prompt; the highest go first.

    So what is left at any time is a uniform sample, the same on every rank and in every run.
    """

    seed: int = bounded(0, 0, 2**63 - 1)

    def scores(self, view: RequestView) -> np.ndarray:
        # One stream a request: its first numbers are the same however long it gets.
        draws = np.random.default_rng((self.seed, view.seed)).random(view.written)
        # A page has the number of its first position: a mean of 16 would not be uniform.
        return draws[view.slot_aliases // view.page * view.page]
