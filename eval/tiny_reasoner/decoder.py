# SPDX-License-Identifier: Apache-2.0
"""A plain decode loop's model: keys and values in tensors that anybody may write into."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class Decoder:
    """The model with its KV in plain tensors; every row of the batch is at the same position.

    Attributes:
        keys, values: fp32 ``[layers, rows, kv heads, length, dim]``.
    """

    def __init__(self, model: Any, rows: int, length: int) -> None:
        config = model.config
        self.model = model
        self.kv_heads, self.dim = config.num_key_value_heads, config.head_dim
        shape = (config.num_hidden_layers, rows, self.kv_heads, length, self.dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        theta = config.rope_parameters["rope_theta"]
        self.frequencies = theta ** (-torch.arange(0, self.dim, 2).float() / self.dim)

    def rotate(self, x: torch.Tensor, positions: int) -> torch.Tensor:
        """Rotate queries or keys onward by ``positions`` (rotary embedding; negative goes back)."""
        angle = positions * self.frequencies
        cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def step(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Feed one token a row; logits of the next."""
        rows = len(tokens)
        x = self.model.model.embed_tokens(tokens)
        for number, layer in enumerate(self.model.model.layers):
            attention, h = layer.self_attn, layer.input_layernorm(x)
            query, key = (
                self.rotate(norm(project(h).view(rows, -1, self.dim)), position)
                for norm, project in (
                    (attention.q_norm, attention.q_proj),
                    (attention.k_norm, attention.k_proj),
                )
            )
            self.keys[number, :, :, position] = key
            self.values[number, :, :, position] = attention.v_proj(h).view(rows, -1, self.dim)
            # Query heads of one KV head are consecutive: group them instead of repeating K and V.
            query = query.view(rows, self.kv_heads, -1, self.dim)
            x = x + attention.o_proj(self.attend(number, query, position).reshape(rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return torch.as_tensor(self.model.lm_head(self.model.model.norm(x)))

    def attend(self, layer: int, query: torch.Tensor, position: int) -> torch.Tensor:
        """Attention of ``query`` ``[rows, kv heads, group, dim]`` to all positions so far."""
        end = position + 1
        return F.scaled_dot_product_attention(
            query, self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        )

    def keep(self, rows: list[int]) -> None:
        """Forget all other rows."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def block(self, row: int, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V, each ``[layers, kv heads, size, dim]``."""
        part = slice(start, start + size)
        return self.keys[:, row, :, part], self.values[:, row, :, part]
