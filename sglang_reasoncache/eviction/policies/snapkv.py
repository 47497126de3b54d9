# SPDX-License-Identifier: Apache-2.0
"""SnapKV: keeps the positions of the prompt that the end of the prompt attends to most."""

from dataclasses import dataclass

import numpy as np
import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, OptionError, bounded
from sglang_reasoncache.eviction.policies.pooling import pooled


@dataclass(frozen=True)
class SnapKV(Evictor):
    """SnapKV (Li et al., arXiv 2404.14469) evicts positions of the prompt after its prefill, until the
    prompt fits the budget; the response stays.

    The prompt's last ``window`` positions stay. So do the prompt positions with the most attention weight from
    the newest ``window`` queries, averaged over neighbours. In a chunked prefill it acts after each chunk.

    Attributes:
        window: How many positions at the end of the prompt stay, and how many newest queries count.
        kernel: Number of neighbouring positions whose weights are averaged.
    """

    # With 1 the policy acts right after the prefill, while the newest ``window`` queries are the prompt's.
    slack: int = bounded(1, 0, 65_536)
    prompt: bool = True
    window: int = bounded(32, 1, 256)
    kernel: int = bounded(7, 1, 63)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompt:
            raise OptionError("prompt", "true, as it gives up positions of the prompt only")

    @property
    def queries(self) -> int:
        return self.window

    def excess(self, view: View, slots: int) -> int:
        """How many slots of the prompt are beyond the budget; the response stays."""
        end = min(view.prompt, view.written)
        held = int(np.searchsorted(view.held, end))
        return min(super().excess(view, slots), max(held - self.allowed(end), 0))

    def candidates(self, view: View) -> np.ndarray:
        response = view.written - min(view.prompt, view.written)
        return view.candidates(max(self.recent, response + self.window))

    def scores(self, view: View) -> torch.Tensor:
        end = min(view.prompt, view.written) - self.window
        prompt = int(np.searchsorted(view.held, end))
        weights = view.mean(lambda layer: layer.weights(view.written - self.window))
        weights[:prompt] = pooled(weights[:prompt], self.kernel, "avg")
        return weights
