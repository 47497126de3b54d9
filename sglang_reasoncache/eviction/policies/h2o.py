# SPDX-License-Identifier: Apache-2.0
"""H2O: keeps the heavy hitters, positions with the most attention in total."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded

#: At least this many newest queries are kept. Kept queries are counted before newer ones overwrite them.
_WINDOW = 32


@dataclass(frozen=True)
class H2O(Evictor):
    """H2O (Zhang et al., arXiv 2306.14048) evicts the positions with the least total attention weight. The
    paper evicts at every token.

    Attributes:
        recent_share: The share of the budget that the newest positions get; at least ``recent`` positions stay.
        prompt_queries: How many of the prompt's last queries count. With ``prompt=true``, the same number of
            queries counts at the end of each prompt chunk. The paper counts all queries.
    """

    accumulates: ClassVar[bool] = True

    recent_share: float = bounded(0.5, 0, 1)
    prompt_queries: int = bounded(32, 0, 256)

    @property
    def queries(self) -> int:
        return max(_WINDOW, self.prompt_queries)

    def candidates(self, view: View) -> np.ndarray:
        newest = int(self.recent_share * self.allowed(view.written))
        return view.candidates(max(self.recent, newest))

    def scores(self, view: View) -> torch.Tensor:
        """The running total, plus the weights that queries gave since the last scoring."""
        first = max(view.seen, min(view.prompt, view.written) - self.prompt_queries)
        total = view.mean(lambda layer: layer.weights(first, view.written))
        return total if view.earlier is None else total + view.earlier
