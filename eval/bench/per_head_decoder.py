# SPDX-License-Identifier: Apache-2.0
"""A decode loop on the embedded model whose caches can differ by layer and head, as papers' do.

An evicted entry is masked where it lies, in every layer and KV head on its own.
Prompts are fed token by token. Evicting only after whole blocks then is block-wise prefill
(KeyDiff, Park et al., 2025, procedure): each token sees what is left of earlier blocks, and all
of its own up to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sglang_reasoncache.eviction.policies.keydiff import similarity
from sglang_reasoncache.eviction.policies.l2norm import relative_norms

#: Queries whose attention SnapKV looks at (Li et al., 2024).
WINDOW = 32


class WatchedDecoder:
    """The model, its KV in plain tensors with masks, and the attention that each entry drew.

    Every row of the batch is at the same position.

    Attributes:
        keys, values: fp32 ``[layers, rows, kv heads, length, dim]``.
        held: bool ``[layers, rows, kv heads, length]``.
        mass: fp32, same shape: attention summed over all queries so far; of query heads that
            share a KV head the mean.
        window: fp32 ``[layers, rows, kv heads, WINDOW, length]``: the same of the newest
            queries each, in any order.
    """

    def __init__(self, model: Any, rows: int, length: int) -> None:
        config = model.config
        self.model = model
        self.kv_heads, self.dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, rows, self.kv_heads, length)
        self.keys, self.values = (torch.zeros((*shape, self.dim)) for _ in range(2))
        self.held = torch.zeros(shape, dtype=torch.bool)
        self.mass = torch.zeros(shape)
        self.window = torch.zeros((*shape[:-1], WINDOW, length))
        theta = config.rope_parameters["rope_theta"]
        self._frequencies = theta ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def step(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Feed one token a row; logits of the next."""
        rows = len(tokens)
        x = self.model.model.embed_tokens(tokens)
        for number, layer in enumerate(self.model.model.layers):
            attention, h = layer.self_attn, layer.input_layernorm(x)
            query, key = (
                self._rotate(norm(project(h).view(rows, -1, self.dim)), position)
                for norm, project in (
                    (attention.q_norm, attention.q_proj),
                    (attention.k_norm, attention.k_proj),
                )
            )
            self.keys[number, :, :, position] = key
            self.values[number, :, :, position] = attention.v_proj(h).view(rows, -1, self.dim)
            # Query heads of one KV head are consecutive: group them instead of repeating K and V.
            query = query.view(rows, self.kv_heads, -1, self.dim)
            x = x + attention.o_proj(self._attend(number, query, position).reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return torch.as_tensor(self.model.lm_head(self.model.model.norm(x)))

    def _rotate(self, x: torch.Tensor, position: int) -> torch.Tensor:
        angle = position * self._frequencies
        cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def _attend(self, layer: int, query: torch.Tensor, position: int) -> torch.Tensor:
        """Of ``query`` ``[rows, kv heads, group, dim]`` to all entries held so far."""
        end = position + 1
        self.held[layer, :, :, position] = True
        keys = self.keys[layer, :, :, :end].transpose(-1, -2) / self.dim**0.5
        there = self.held[layer, :, :, None, :end]
        weights = (query @ keys).masked_fill(~there, float("-inf")).softmax(-1)
        drawn = weights.mean(dim=2)
        self.mass[layer, :, :, :end] += drawn
        self.window[layer, :, :, position % WINDOW, :end] = drawn
        return weights @ self.values[layer, :, :, :end]

    def keep(self, rows: list[int]) -> None:
        """Forget all other rows."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]
        self.held, self.mass = self.held[:, rows], self.mass[:, rows]
        self.window = self.window[:, rows]

    def held_keys(self, written: int) -> torch.Tensor:
        """fp32 ``[layers, rows, kv heads, written, dim]``, zero where nothing is held."""
        return self.keys[..., :written, :] * self.held[..., :written, None]


@dataclass(frozen=True)
class Schedule:
    """When and down to what entries are evicted. Exactly one of ``share`` and ``budget``.

    Attributes:
        share: of the positions so far that a head holds, from the prompt's end on.
        budget: entries of a head; kept during prefill as well, after each block.
        block: tokens of a prefill block.
        slack: entries above that before a response's entries are evicted.
        recent: newest entries that stay.
        recent_share: the same as a share of what may stay, where that is more.
        keep_prompt: whether the prompt stays, as it does in a server.
    """

    share: float | None = None
    budget: int | None = None
    block: int = 128
    slack: int = 8
    recent: int = 32
    recent_share: float = 0.0
    keep_prompt: bool = True

    def excess(self, written: int, prompt: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        """How many entries are too many now: int64 ``[rows]``.

        Args:
            written: positions so far, the same for all rows.
            prompt: int64 ``[rows]``, lengths.
            held: int64 ``[rows]``, entries of each head.
        """
        over = held - self._allowed(written)
        acts = (written > prompt) & (over > self.slack)
        if self.share is None:
            acts |= (written == prompt) | ((written < prompt) & (written % self.block == 0))
        return torch.where(acts, over.clamp_min(0), 0)

    def stays(self, written: int, prompt: torch.Tensor) -> torch.Tensor:
        """bool ``[rows, written]``: positions that are not up for choice."""
        positions = torch.arange(written)
        recent = max(self.recent, 1, int(self.recent_share * self._allowed(written)))
        newest = (positions >= written - recent).expand(len(prompt), written)
        return newest | (positions < prompt[:, None]) if self.keep_prompt else newest

    def _allowed(self, written: int) -> int:
        if self.share is not None:
            return math.ceil(self.share * written)
        assert self.budget is not None, "one of the two is given"
        return self.budget


def evict(
    decoder: WatchedDecoder,
    scores: torch.Tensor,
    stays: torch.Tensor,
    excess: torch.Tensor,
    per_head: bool,
) -> None:
    """Evict the entries of highest score, as many in every head of a row; older ones first.

    Args:
        decoder: whose ``held`` changes.
        scores: fp32 ``[layers, rows, kv heads, written]``.
        stays: bool ``[rows, written]``.
        excess: int64 ``[rows]``.
        per_head: each layer and head chooses by its own scores; else all take the choice by
            their mean.
    """
    written = scores.shape[-1]
    if not per_head:
        scores = scores.mean(dim=(0, 2), keepdim=True).expand_as(scores)
    held = decoder.held[..., :written]
    barred = ~held | stays[None, :, None]
    order = scores.masked_fill(barred, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    ranks = order.argsort(dim=-1)
    decoder.held[..., :written] = held & ((ranks >= excess[None, :, None, None]) | barred)


#: Scores ``[layers, rows, kv heads, written]``, of which the highest are evicted, from a decoder
#: and the number of positions written so far.
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
