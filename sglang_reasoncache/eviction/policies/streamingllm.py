# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: keeps the first positions (sinks) and a window of the newest."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded


@dataclass(frozen=True)
class StreamingLLM(Evictor):
    """StreamingLLM (Xiao et al., arXiv 2309.17453) evicts the oldest positions after the sinks. Positions are
    not renumbered; the paper renumbers them within its cache.

    Attributes:
        sinks: How many of the first positions stay. Without ``prompt=true`` the whole prompt stays anyway.
    """

    sinks: int = bounded(4, 0, 65_536)

    def candidates(self, view: View) -> np.ndarray:
        sinks = math.ceil(self.sinks / view.page) * view.page
        return dataclasses.replace(view, owned=max(view.owned, sinks)).candidates(self.recent)

    def scores(self, view: View) -> torch.Tensor:
        return torch.from_numpy(view.held)
