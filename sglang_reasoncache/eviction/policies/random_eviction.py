# SPDX-License-Identifier: Apache-2.0
"""Random eviction: what a budget costs when nothing is known about the positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_reasoncache.eviction.policies.contract import RequestView
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor
from sglang_reasoncache.policy_options import between


@dataclass(frozen=True)
class RandomEviction(ScoringEvictor):
    """Each slot draws a number once; those with the highest go first.

    So at any time the slots that are left are a uniform sample of all that were up for it,
    and the same prompt and seed give the same sample on every rank and in every run.

    Attributes:
        seed: Of all numbers, together with the prompt.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        between("seed", self.seed, 0, 2**63 - 1)

    def scores(self, view: RequestView) -> np.ndarray:
        # One stream a request: its first numbers are the same however long it gets.
        draws = np.random.default_rng((self.seed, view.seed)).random(view.written)
        # A page has the number of its first position, and what shares it has the same; a mean
        # of 16 would be no longer uniform.
        first = view.slot_aliases // view.page * view.page
        return draws[first]
