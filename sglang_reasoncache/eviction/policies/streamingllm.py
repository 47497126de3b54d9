# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: sinks and a window."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded


@dataclass(frozen=True)
class StreamingLLM(Evictor):
    """StreamingLLM (Xiao et al., arXiv 2309.17453): the oldest positions behind the sinks go.
    Positions keep their numbers, where the paper counts anew within its cache.

    Attributes:
        sinks: First positions of the request that stay. The prompt stays anyway.
    """

    sinks: int = bounded(4, 0, 65_536)

    def candidates(self, view: View) -> np.ndarray:
        sinks = math.ceil(self.sinks / view.page) * view.page
        return dataclasses.replace(view, owned=max(view.owned, sinks)).candidates(self.recent)

    def scores(self, view: View) -> torch.Tensor:
        return torch.from_numpy(view.held)
