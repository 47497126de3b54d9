# SPDX-License-Identifier: Apache-2.0
"""KeyDiff: keeps keys that are unlike the others."""

from dataclasses import dataclass

import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, one_of

#: The paper guards its denominators with a constant. This value is ours, because the paper gives none.
_EPSILON = 1e-8
ANCHORS = ("mean", "unit-mean", "median")
METRICS = ("cosine", "dot", "euclidean")


def similarity(keys: torch.Tensor, anchor: str = "mean", metric: str = "cosine") -> torch.Tensor:
    """How much each key is like its head's anchor, a key that stands for all keys of the head.

    Args:
        keys: ``[held, heads, head_dim]``.
        anchor: The ``mean`` of the keys, the ``unit-mean`` (of the keys scaled to length 1) or the ``median``
            of each dimension. With cosine, ``unit-mean`` ranks the keys of a head like their mean cosine with
            all keys (the paper's pairwise scores).
        metric: ``cosine``, the ``dot`` product, or ``euclidean`` for minus the distance.

    Returns:
        ``[heads, held]``.
    """
    if anchor == "median":
        middle = keys.float().median(dim=0).values
    elif anchor == "unit-mean":
        middle = (keys / keys.norm(dim=-1, keepdim=True).clamp_min(_EPSILON)).mean(dim=0)
    else:
        middle = keys.mean(dim=0)
    if metric == "euclidean":
        return -(keys - middle).norm(dim=-1).T
    product = (keys * middle).sum(dim=-1)
    if metric == "dot":
        return product.T
    lengths = keys.norm(dim=-1) * middle.norm(dim=-1)
    return (product / lengths.clamp_min(_EPSILON)).T


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """KeyDiff (Park et al., arXiv 2504.15364) evicts the keys that are most like the mean of all held keys.

    Keys are compared as cached, after rotation. The paper does not say whether keys are compared before or
    after rotation. The paper protects either no recent positions (``recent=1``) or 10 to 20% of the budget.

    Attributes:
        anchor, metric: What keys are compared with, and how; see :func:`similarity`. The paper's ablations.
    """

    anchor: str = "mean"
    metric: str = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("anchor", self.anchor, ANCHORS)
        one_of("metric", self.metric, METRICS)

    def scores(self, view: View) -> torch.Tensor:
        return -view.mean(lambda layer: similarity(layer.stored(), self.anchor, self.metric))
