# SPDX-License-Identifier: Apache-2.0
"""Rules of :mod:`eval.bench.per_head`: entries of the highest score are evicted.

Scores that need only keys are those of our policies (``sglang_reasoncache.eviction.policies``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from eval.bench.per_head_decoder import WatchedDecoder
from sglang_reasoncache.eviction.policies.keydiff import similarity
from sglang_reasoncache.eviction.policies.l2norm import relative_norms

#: A decoder and the positions written so far to ``[layers, rows, kv heads, written]``.
Rule = Callable[[WatchedDecoder, int], torch.Tensor]

_SINKS = 4
#: SnapKV's smoothing as KeyDiff's authors ran it.
_KERNEL = 7


def streamingllm(decoder: WatchedDecoder, written: int) -> torch.Tensor:
    """Oldest first, behind the sinks (Xiao et al., 2024)."""
    ages = torch.arange(written, 0, -1.0)
    ages[:_SINKS] = 0
    return ages.expand(*decoder.held.shape[:-1], written)


def keydiff(decoder: WatchedDecoder, written: int) -> torch.Tensor:
    """Cosine with the mean of the held keys, as they are (Park et al., 2025)."""
    # Zeros in place of what is not held change the mean's length, and so no cosine.
    return _by_keys(decoder, written, lambda keys: similarity(keys, "mean_raw"))


def l2norm(decoder: WatchedDecoder, written: int) -> torch.Tensor:
    """Largest norms first (Devoto et al., 2024)."""
    return _by_keys(decoder, written, relative_norms)


def h2o(decoder: WatchedDecoder, written: int) -> torch.Tensor:
    """Least attention so far first (Zhang et al., 2023)."""
    return -decoder.mass[..., :written]


def snapkv(decoder: WatchedDecoder, written: int) -> torch.Tensor:
    """Least attention by the newest queries first, smoothed over neighbours (Li et al., 2024).

    The paper scores the prompt once; here as often as entries are evicted, as KeyDiff's
    authors ran it.
    """
    drawn = decoder.window[..., :written].mean(dim=-2)
    pooled = F.avg_pool1d(drawn.flatten(0, 2)[:, None], _KERNEL, 1, _KERNEL // 2)
    return -pooled[:, 0].view_as(drawn)


RULES: dict[str, Rule] = {
    rule.__name__: rule for rule in (streamingllm, h2o, snapkv, keydiff, l2norm)
}


def _by_keys(
    decoder: WatchedDecoder, written: int, score: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    keys = decoder.held_keys(written)
    # A policy takes [held, heads, dim] and treats each head alone: rows and layers are heads too.
    scores = score(keys.permute(3, 0, 1, 2, 4).flatten(1, 3))
    return scores.view(written, *keys.shape[:3]).permute(1, 2, 3, 0)
