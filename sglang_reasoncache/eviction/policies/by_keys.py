# SPDX-License-Identifier: Apache-2.0
"""Policies that rank positions by their keys alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_reasoncache.eviction.policies.contract import KEYS, UNROTATED_KEYS, RequestView
from sglang_reasoncache.eviction.policies.evictor import ScoringEvictor
from sglang_reasoncache.policy_options import one_of

if TYPE_CHECKING:
    import numpy as np
    import torch

#: The KeyDiff paper guards its denominators and does not say with what.
_EPSILON = 1e-8


def relative_norms(keys: torch.Tensor) -> torch.Tensor:
    """``[held, heads, head_dim]`` to ``[held, heads]``: norms over their mean in the head.

    Within a head the order is the paper's; plain norms of different layers cannot be averaged.
    """
    norms = keys.norm(dim=-1)
    return norms / norms.mean(dim=0).clamp_min(1e-12)


@dataclass(frozen=True)
class L2Norm(ScoringEvictor):
    """Key norms (Devoto et al., 2024): gives up the positions with the largest keys. Rotation does
    not change a norm."""

    needs = frozenset({KEYS})

    def scores(self, view: RequestView) -> np.ndarray:
        return view.keys.token_scores(relative_norms)


def similarity(keys: torch.Tensor, variant: str) -> torch.Tensor:
    """``[held, heads, head_dim]`` to ``[held, heads]``: how much like the others each key is.

    ``mean_raw`` and ``mean_norm``: its cosine with the mean of the keys, as they are or at
    length 1. ``pairwise``: the mean of its cosines with all keys, which ranks a head as
    ``mean_norm`` does, and in an average weighs heads more whose keys point the same way.
    """
    lengths = keys.norm(dim=-1, keepdim=True)
    unit = keys / lengths.clamp_min(_EPSILON)
    mean = (keys if variant == "mean_raw" else unit).mean(dim=0)
    if variant == "pairwise":
        return (unit * mean).sum(dim=-1)
    product = (keys * mean).sum(dim=-1)
    return product / (lengths[..., 0] * mean.norm(dim=-1)).clamp_min(_EPSILON)


@dataclass(frozen=True)
class KeyDiff(ScoringEvictor):
    """KeyDiff (Park et al., 2025): gives up the positions whose keys are most like the mean of all
    held keys.

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
    def needs(self) -> frozenset[str]:
        return frozenset({KEYS if self.keys == "cached" else UNROTATED_KEYS})

    def scores(self, view: RequestView) -> np.ndarray:
        score = functools.partial(similarity, variant=self.anchor)
        return view.keys.token_scores(score, unrotated=self.keys == "unrotated")
