# SPDX-License-Identifier: Apache-2.0
"""Random Attention: keeps the prompt, and a uniform sample of the other positions."""

from dataclasses import dataclass

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded


@dataclass(frozen=True)
class RandomAttention(Evictor):
    """Random Attention (arXiv 2609.03430) evicts reasoning tokens uniformly at random; the prompt stays (unless
    ``prompt=true``). The paper draws for each head; here one draw decides for all heads of a slot.

    Each slot has one random number, which depends on ``seed`` and the prompt. Slots with the lowest numbers are
    evicted first. So the positions that stay are a uniform sample of all that could be evicted, however often
    the policy acted, and they are the same on every rank and in every run.
    """

    seed: int = bounded(0, 0, 2**63 - 1)

    def scores(self, view: View) -> torch.Tensor:
        # The numbers of earlier positions do not change when the request gets longer.
        draws = np.random.default_rng((self.seed, view.seed)).random(view.written)
        # All positions of a page get the number of the page's first position: pages are evicted as a whole.
        return torch.from_numpy(draws[view.first_readers // view.page * view.page])
