# SPDX-License-Identifier: Apache-2.0
"""TriAttention: keeps the keys that later queries are expected to attend to, judging by recent queries."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from sglang_reasoncache.eviction.policies.contract import Layer, View
from sglang_reasoncache.eviction.policies.evictor import Evictor, bounded


@dataclass(frozen=True)
class TriAttention(Evictor):
    """TriAttention (Mao et al., arXiv 2604.04921). Before rotary embedding, a head's queries are close to their
    mean, the *centre*. So a key and its distance to a later query are enough to predict the query's logit.

    Write the centre q and a key k, both before rotation, as one complex number per rotary frequency w_f. The
    score is the sum of two terms. ``sum |q| |k| cos(w_f D + arg(q / k))`` is averaged over the distances D
    to queries 1, 2, 4, ... positions after the newest token. ``sum (mean |query| - |q|) |k|`` grows with the
    spread of queries around the centre. Each head's scores are normalized to mean 0 and standard deviation 1.

    The authors measure centres beforehand on other texts; here a centre is the mean of the request's newest
    ``window`` queries. The authors take the highest score of any head; here the heads' scores are averaged.

    Attributes:
        window: Number of newest queries whose mean is the centre.
        reach: Largest distance to a later query, in positions; the rotary table's length limits it too.
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
            # For one later query, the first term is the dot product of the rotated keys with the centre
            # rotated to that query's position. The dot product is linear, so the mean of all rotated
            # centres needs only one product.
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
    """Dot products of ``[heads, dim]`` queries with ``[kv_heads, held, dim]`` keys: ``[heads, held]``."""
    grouped = queries.unflatten(0, (len(keys), -1))
    return (grouped @ keys.transpose(1, 2)).flatten(0, 1)
