# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM (Xiao et al., 2024): attention sinks and a window of the newest positions.

Positions keep their numbers, where the paper counts anew within its cache.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from sglang_reasoncache.eviction.policies.contract import RequestView
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor, bounded


@dataclass(frozen=True)
class StreamingLLM(ScoringEvictor):
    """Gives up the oldest positions behind the sinks.

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
