# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: keys unlike the others stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor
from sglang_reasoncache.policy_options import one_of

#: The paper guards its denominators and does not say with what.
_EPSILON = 1e-8


def similarity(keys: torch.Tensor, variant: str) -> torch.Tensor:
    """``[held, heads, head_dim]`` to ``[heads, held]``: how much like the others each key is.

    ``mean_raw`` and ``mean_norm``: its cosine with the mean of the keys, as they are or at
    length 1. ``pairwise``: the mean of its cosines with all keys, which ranks a head as
    ``mean_norm`` does, and in an average weighs heads more whose keys point the same way.
    """
    lengths = keys.norm(dim=-1, keepdim=True)
    unit = keys / lengths.clamp_min(_EPSILON)
    mean = (keys if variant == "mean_raw" else unit).mean(dim=0)
    if variant == "pairwise":
        return (unit * mean).sum(dim=-1).T
    product = (keys * mean).sum(dim=-1)
    return (product / (lengths[..., 0] * mean.norm(dim=-1)).clamp_min(_EPSILON)).T


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """KeyDiff (Park et al., arXiv 2504.15364): the keys most like the mean of all held keys go.

    The paper protects no recent positions (``recent=1``), or 10 to 20% of the budget.

    Attributes:
        anchor: What a key is compared with, see :func:`similarity`.
        keys: ``cached`` compares them as they lie in the pool, rotated; ``unrotated`` as
            they were before rotary embedding. The paper does not say which.
    """

    anchor: str = "mean_raw"
    keys: str = "cached"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("anchor", self.anchor, ("mean_raw", "mean_norm", "pairwise"))
        one_of("keys", self.keys, ("cached", "unrotated"))

    @property
    def unrotates(self) -> bool:
        return self.keys == "unrotated"

    def scores(self, view: View) -> torch.Tensor:
        return -view.mean(
            lambda layer: similarity(
                layer.unrotated() if self.unrotates else layer.stored(), self.anchor
            )
        )
