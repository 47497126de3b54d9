# SPDX-License-Identifier: Apache-2.0
"""TriAttention: keeps the keys that later queries will attend to, if later queries resemble recent ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_reasoncache.eviction.policies.contract import Layer, View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded


@dataclass(frozen=True)
class TriAttention(Evictor):
    """TriAttention (Mao et al., arXiv 2604.04921): before rotary embedding, queries are close to a
    centre, so the logits that a key will get from later queries follow from the key's position.

    Take a head's mean query q and a key k at distance D, before rotation, as one complex number per frequency
    f. The paper's score has two terms. ``sum |q| |k| cos(w_f D + arg(q / k))`` is averaged over the distances
    of queries 1, 2, 4, ... ``reach`` positions ahead. ``sum (mean |query| - |q|) |k|`` accounts for how far
    queries are from their centre. Each head's scores are brought to mean 0 and deviation 1.

    The authors measure centres beforehand on other texts; here a centre is the mean of the request's newest
    ``window`` queries. The authors take the highest score of any head; here the heads' scores are averaged.

    Attributes:
        window: How many of the newest queries make up the centre.
        reach: Distance to the farthest query ahead, at most the length of the rotary table.
    """

    unrotates: ClassVar[bool] = True

    slack: int = bounded(128, 0, 65_536)
    window: int = bounded(32, 1, 256)
    reach: int = bounded(65_536, 1, 1 << 20)

    @property
    def queries(self) -> int:
        return self.window

    def scores(self, view: View) -> torch.Tensor:
        def score(layer: Layer) -> torch.Tensor:
            rotation = layer.rotation
            assert rotation is not None, "refused at the start otherwise"
            queries, positions, kept = layer.queries(view.written - self.window)
            plain = rotation.rotate(queries, -positions) * kept[:, None, None]
            count = kept.sum().clamp_min(1)
            centre = plain.sum(dim=0) / count
            spread = rotation.magnitudes(plain).sum(dim=0) / count - rotation.magnitudes(centre)
            # The first term equals the product of the used keys with the centre, once the centre is
            # rotated to the position of a later query. The product is linear in the rotated centre,
            # so the centre is rotated to all distances and averaged before the one product.
            last = min(self.reach, len(rotation.cos) - 1)
            steps = 2 ** torch.arange(last.bit_length(), device=centre.device)
            now = rotation.rotate(centre, torch.full_like(steps[0], view.written))
            ahead = rotation.rotate(now.expand(len(steps), -1, -1), steps).mean(dim=0)
            keys = layer.used().transpose(0, 1)
            series = _product(ahead, keys) + _product(spread, rotation.magnitudes(keys))
            deviation = series.std(dim=1, keepdim=True, correction=0).clamp_min(1e-6)
            return (series - series.mean(dim=1, keepdim=True)) / deviation

        return view.mean(score)


def _product(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[heads, dim]`` and ``[kv_heads, held, dim]`` to ``[heads, held]``."""
    grouped = queries.unflatten(0, (len(keys), -1))
    return (grouped @ keys.transpose(1, 2)).flatten(0, 1)
