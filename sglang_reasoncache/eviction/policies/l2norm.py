# SPDX-License-Identifier: Apache-2.0
"""Key norms (Devoto et al., 2024): keys of low L2 norm draw attention and stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_reasoncache.eviction.policies.contract import KEYS, RequestView
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor

if TYPE_CHECKING:
    import numpy as np
    import torch


def relative_norms(keys: torch.Tensor) -> torch.Tensor:
    """``[held, heads, head_dim]`` to ``[held, heads]``: norms over their mean in the head.

    Within a head the order is the paper's; plain norms of different layers cannot be averaged.
    """
    norms = keys.norm(dim=-1)
    return norms / norms.mean(dim=0).clamp_min(1e-12)


@dataclass(frozen=True)
class L2Norm(ScoringEvictor):
    """Gives up the positions with the largest keys. Rotation does not change a norm."""

    needs = frozenset({KEYS})

    def scores(self, view: RequestView) -> np.ndarray:
        return view.keys.token_scores(relative_norms)
