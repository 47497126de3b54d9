# SPDX-License-Identifier: Apache-2.0
"""Rotate a cached key by a difference of positions, with the model's own frequencies.

``attention/served.py: key_rotation`` decides which models have such a rotation."""

from __future__ import annotations

import copy

import torch


class KeyRotation:
    """Rotation of the first ``rotary_dim`` dims of a head by whole positions.

    A shift by ``n`` uses row ``|n|`` of the table. Row 0 tells the table's scale, the attention-scaling factor
    (YaRN). The table is divided by this scale, because a cached key already has it.
    """

    def __init__(self, table: torch.Tensor, rotary_dim: int, is_neox: bool) -> None:
        """``table``: ``[max_positions, rotary_dim]``, cosines then sines, used in fp32. ``is_neox``: whether
        to pair the two halves of the dims instead of neighbouring dims (GPT-J)."""
        table = table.float()
        scale = table[0, 0]
        half = rotary_dim // 2
        self.cos = (table[:, :half] / scale).contiguous()
        self.sin = (table[:, half:rotary_dim] / scale).contiguous()
        self.rotary_dim = rotary_dim
        self.is_neox = is_neox

    def to(self, device: torch.device) -> KeyRotation:
        """The rotation with its table on ``device``."""
        if self.cos.device == device:
            return self
        there = copy.copy(self)
        there.cos, there.sin = self.cos.to(device), self.sin.to(device)
        return there

    def none(self) -> KeyRotation:
        """A rotation of the same shape by angle 0, for layers that do not rotate keys."""
        still = copy.copy(self)
        still.cos, still.sin = torch.ones_like(self.cos), torch.zeros_like(self.sin)
        return still

    def rotate(self, keys: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Rotate ``keys`` ``[..., heads, head_dim]`` by int ``[...]`` positions; fp32 result."""
        row = shift.abs().long()
        cos = self.cos[row][..., None, :]
        sin = (self.sin[row] * shift.sign()[..., None])[..., None, :]
        keys = keys.float()
        x, y = self._pairs(keys)
        pair = x * cos - y * sin, y * cos + x * sin
        out = torch.cat(pair, dim=-1) if self.is_neox else torch.stack(pair, dim=-1).flatten(-2)
        if self.rotary_dim == keys.shape[-1]:
            return out
        return torch.cat((out, keys[..., self.rotary_dim :]), dim=-1)

    def magnitudes(self, keys: torch.Tensor) -> torch.Tensor:
        """The lengths of the pairs of dims that are rotated together; no rotation changes these lengths.
        ``keys``: ``[..., head_dim]``; returns ``[..., rotary_dim / 2]``."""
        return torch.hypot(*self._pairs(keys))

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = keys[..., : self.rotary_dim]
        if self.is_neox:
            first, second = rotated.chunk(2, dim=-1)
            return first, second
        return rotated[..., ::2], rotated[..., 1::2]
