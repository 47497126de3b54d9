# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: keeps keys that are unlike the others."""

from dataclasses import dataclass

import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor

#: The paper guards its denominators with a constant. This value is ours, because the paper gives none.
_EPSILON = 1e-8


def similarity(keys: torch.Tensor) -> torch.Tensor:
    """Maps ``[held, heads, head_dim]`` to ``[heads, held]``: each key's cosine with its head's mean key."""
    mean = keys.mean(dim=0)
    lengths = keys.norm(dim=-1) * mean.norm(dim=-1)
    return ((keys * mean).sum(dim=-1) / lengths.clamp_min(_EPSILON)).T


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """KeyDiff (Park et al., arXiv 2504.15364) evicts the keys that are most like the mean of all held keys.

    Keys are compared as cached, after rotation. The paper does not say whether keys are compared before or
    after rotation. The paper protects either no recent positions (``recent=1``) or 10 to 20% of the budget.
    """

    def scores(self, view: View) -> torch.Tensor:
        return -view.mean(lambda layer: similarity(layer.stored()))
