# SPDX-License-Identifier: Apache-2.0
"""Rotates cached keys from one position to another, with the frequencies of the model's rotary embedding.

``attention/rotations.py`` makes a model's rotation, or says why the model's keys cannot be rotated."""

from __future__ import annotations

import copy

import torch


class KeyRotation:
    """Rotates the first ``rotary_dim`` dims of each head by a whole number of positions.

    A rotation by ``n`` positions uses row ``|n|`` of the rotary table. The cosines in row 0 are the table's
    scale: 1, or YaRN's attention factor. Cached keys are scaled already, so the table is divided by the scale.
    """

    def __init__(self, table: torch.Tensor, rotary_dim: int, is_neox: bool) -> None:
        """``table``: ``[max_positions, rotary_dim]``, used in fp32; each row has its cosines, then its sines.
        ``is_neox``: whether to pair the two halves of the dims instead of neighbouring dims (GPT-J)."""
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
        there.cos = self.cos.to(device)
        there.sin = self.sin.to(device)
        return there

    def none(self) -> KeyRotation:
        """A rotation by angle 0 with a table of the same shape, for layers that do not rotate keys."""
        still = copy.copy(self)
        still.cos = torch.ones_like(self.cos)
        still.sin = torch.zeros_like(self.sin)
        return still

    def rotate(self, keys: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Rotate ``keys`` ``[..., heads, head_dim]`` by ``shift`` positions (int ``[...]``). Returns fp32."""
        row = shift.abs().long().clamp_(max=len(self.cos) - 1)
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
        """The norm of each pair of dims that are rotated together. Rotating does not change these norms.
        ``keys``: ``[..., head_dim]``; returns ``[..., rotary_dim / 2]``."""
        return torch.hypot(*self._pairs(keys))

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = keys[..., : self.rotary_dim]
        if self.is_neox:
            first, second = rotated.chunk(2, dim=-1)
            return first, second
        return rotated[..., ::2], rotated[..., 1::2]
