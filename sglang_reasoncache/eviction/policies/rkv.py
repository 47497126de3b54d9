# SPDX-License-Identifier: Apache-2.0
"""R-KV: keeps positions that get attention and are not redundant."""

from dataclasses import dataclass

import torch

from sglang_reasoncache.eviction.policies.contract import View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded
from sglang_reasoncache.eviction.policies.pooling import pooled

_EPSILON = 1e-8
#: Limit on the cosines computed at once.
_ELEMENTS = 1 << 20


def redundancy(keys: torch.Tensor, threshold: float, reach: int) -> torch.Tensor:
    """The paper's R: each key's mean cosine with the other keys, passed through a softmax over positions. Maps
    keys ``[held, heads, head_dim]`` to ``[heads, held]``.
    For each key, the newest similar other key (cosine above ``threshold``) is spared: this cosine counts as 0
    in the other key's mean. So the newest of similar keys tends to stay. Only the newest ``reach`` keys can be
    spared.
    """
    count = len(keys)
    unit = (keys / (keys.norm(dim=-1, keepdim=True) + _EPSILON)).transpose(0, 1)
    # A unit key's dot product with the sum of all other unit keys is the sum of its cosines with them.
    sums = (unit * (unit.sum(dim=1, keepdim=True) - unit)).sum(dim=-1)
    first = max(0, count - reach)
    newest = unit[:, first:].transpose(1, 2)
    order = sums.new_ones(count - first).cumsum(0)
    rows = max(1, _ELEMENTS // max(1, len(unit) * len(order)))
    for begin in range(0, count, rows):
        cosines = unit[:, begin : begin + rows] @ newest
        # A key's cosine with itself does not count.
        cosines.diagonal(begin - first, 1, 2).zero_()
        spared = ((cosines > threshold) * order).max(dim=-1, keepdim=True)
        saved = cosines.gather(-1, spared.indices) * (spared.values > 0)
        sums.scatter_add_(1, spared.indices[..., 0] + first, -saved[..., 0])
    return (sums / max(1, count)).softmax(dim=-1)


@dataclass(frozen=True)
class RKV(Evictor):
    """R-KV (Cai et al., arXiv 2505.24133) evicts the positions with the lowest
    ``mix * importance - (1 - mix) * redundancy``.

    Importance is the attention weight from the newest ``alpha`` queries, averaged over queries, layers and
    heads, then max-pooled over ``kernel`` neighbours. The paper acts every 128 tokens (``slack``) and keeps the
    newest ``alpha`` positions (``recent``).

    Attributes:
        mix: The paper's lambda.
        alpha: Number of newest queries whose attention counts.
        kernel: Number of neighbouring held positions whose weights are pooled.
        threshold: Cosine above which two keys count as similar.
        reach: How many of the newest held positions are searched for a similar key. The paper can search all,
            because its cache never exceeds its budget plus a buffer."""

    slack: int = bounded(128, 0, 65_536)
    recent: int = bounded(8, 1, 65_536)
    mix: float = bounded(0.1, 0, 1)
    alpha: int = bounded(8, 1, 64)
    kernel: int = bounded(7, 1, 63)
    threshold: float = bounded(0.5, -1, 1)
    reach: int = bounded(512, 1, 65_536)

    @property
    def queries(self) -> int:
        return self.alpha

    def scores(self, view: View) -> torch.Tensor:
        # The newest query is the one of the forward pass in flight, if the request is in it.
        first = view.written - self.alpha
        weights = view.mean(lambda layer: layer.weights(first, newest=self.alpha))
        # A query's weights sum to 1, so this divides by the number of queries.
        importance = pooled(weights / weights.sum().clamp_min(1), self.kernel, "max")
        redundant = view.mean(lambda layer: redundancy(layer.stored(), self.threshold, self.reach))
        return self.mix * importance - (1 - self.mix) * redundant
