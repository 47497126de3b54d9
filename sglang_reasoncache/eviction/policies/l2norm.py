# SPDX-License-Identifier: Apache-2.0
"""L2 norm: keeps keys of low norm."""

from dataclasses import dataclass

import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor


def relative_norms(keys: torch.Tensor) -> torch.Tensor:
    """Maps ``[held, heads, head_dim]`` to ``[heads, held]``: each key's norm divided by its head's mean norm.

    Dividing keeps the paper's order within a head. Without it, layers with large norms would dominate scores.
    """
    norms = keys.norm(dim=-1)
    return (norms / norms.mean(dim=0).clamp_min(1e-12)).T


@dataclass(frozen=True)
class L2Norm(Evictor):
    """L2 norm (Devoto et al., arXiv 2406.11430) evicts the keys of highest norm. Rotation changes no norm."""

    def scores(self, view: View) -> torch.Tensor:
        return -view.mean(lambda layer: relative_norms(layer.stored()))
