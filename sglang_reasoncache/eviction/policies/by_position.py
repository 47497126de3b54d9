# SPDX-License-Identifier: Apache-2.0
"""Policies that look at no keys and no attention."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from sglang_reasoncache.eviction.policies.contract import RequestView
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor, bounded


@dataclass(frozen=True)
class StreamingLLM(ScoringEvictor):
    """StreamingLLM (Xiao et al., 2024): gives up the oldest positions behind the sinks. Positions
    keep their numbers, where the paper counts anew within its cache.

    Attributes:
        sinks: First positions of the request that stay. The prompt stays anyway.
    """

    sinks: int = bounded(4, 0, 65_536)

    def candidates(self, view: RequestView) -> np.ndarray:
        sinks = math.ceil(self.sinks / view.page) * view.page
        behind = dataclasses.replace(view, owned=max(view.owned, sinks))
        return behind.candidates(self.recent)

    def scores(self, view: RequestView) -> np.ndarray:
        return -view.held


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
