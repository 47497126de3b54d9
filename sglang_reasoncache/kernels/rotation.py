# SPDX-License-Identifier: Apache-2.0
"""Rotate a cached key by a difference of positions, with the model's own frequencies."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sglang_reasoncache import compat

_FLAG = "--reasoncache-positions corrected"

#: Rotary modules with one table of angles that are linear in the position.
_LINEAR_KINDS = (
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "DynamicNTKAlphaRotaryEmbedding",
    "DynamicNTKScalingRotaryEmbedding",
)

#: Attention modules that, where the attribute is true, scale each dim of a key by a learned weight
#: after its rotation.
_SCALES_ROTATED_KEYS = {"HunYuanAttention": "use_qk_norm"}


class KeyRotation:
    """Rotation of the first ``rotary_dim`` dims of a head by whole positions.

    A shift ``n`` turns by the table's row ``|n|``, divided by row 0: a key already has the
    attention-scaling factor (YaRN).
    """

    def __init__(self, table: torch.Tensor, rotary_dim: int, is_neox: bool) -> None:
        """``table``: ``[max_positions, rotary_dim]``, cosines then sines, used in fp32; ``is_neox``
        pairs halves instead of neighbours (GPT-J)."""
        table = table.float()
        scale = table[0, 0]
        half = rotary_dim // 2
        self.cos = (table[:, :half] / scale).contiguous()
        self.sin = (table[:, half:rotary_dim] / scale).contiguous()
        self.rotary_dim = rotary_dim
        self.is_neox = is_neox

    @classmethod
    def from_model(cls, model: torch.nn.Module, max_positions: int) -> KeyRotation:
        """Read the rotary embedding all attention layers of ``model`` share.

        Raises:
            ValueError: no rotary embedding, several, a kind whose angle is not linear in the
                position, keys not or not only rotated, or a table shorter than the context.
        """
        found = _rotary_modules(model)
        kinds = {type(m).__name__ for m in found}
        if len(kinds) != 1 or not kinds <= set(_LINEAR_KINDS):
            raise ValueError(
                f"{_FLAG} needs one plain rotary embedding per model, "
                f"found {sorted(kinds) or 'none'}; as-cached works without"
            )
        _check_layers(model)
        table, *others = (m._compute_cos_sin_cache().float() for m in found)
        if any(not torch.equal(other, table) for other in others):
            raise ValueError(f"{_FLAG} needs the same rotary embedding in every layer")
        if len(table) < max_positions:
            raise ValueError(
                f"{_FLAG}: the rotary table holds {len(table)} positions, "
                f"--context-length is {max_positions}"
            )
        return cls(table, found[0].rotary_dim, found[0].is_neox_style)

    def to(self, device: torch.device) -> KeyRotation:
        """With its table there; itself where it is."""
        if self.cos.device == device:
            return self
        there = copy.copy(self)
        there.cos, there.sin = self.cos.to(device), self.sin.to(device)
        return there

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
        """``[..., head_dim]`` to ``[..., rotary_dim / 2]``: lengths of the pairs of dims that are
        rotated together, which no rotation changes."""
        return torch.hypot(*self._pairs(keys))

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = keys[..., : self.rotary_dim]
        if self.is_neox:
            first, second = rotated.chunk(2, dim=-1)
            return first, second
        return rotated[..., ::2], rotated[..., 1::2]


def _rotary_modules(model: torch.nn.Module) -> list[Any]:
    """Each once; also SGLang's that are no RotaryEmbedding (LongRoPE, dual chunk)."""
    package = compat.RotaryEmbedding.__module__.rpartition(".")[0] + "."
    return [
        module
        for module in model.modules()
        if isinstance(module, compat.RotaryEmbedding) or type(module).__module__.startswith(package)
    ]


def _check_layers(model: torch.nn.Module) -> None:
    """Raises ValueError where a layer's cached keys are not, or not only, rotated."""
    for name, owner in model.named_modules():
        children = list(owner.children())
        heads = {c.qk_head_dim for c in children if isinstance(c, compat.RadixAttention)}
        if not heads:
            continue
        kind = type(owner).__name__
        # One made for a part of the head leaves open which dims that part is.
        sizes = {c.head_size for c in children if isinstance(c, compat.RotaryEmbedding)}
        if not sizes:
            raise ValueError(
                f"{_FLAG} needs a rotary embedding in every attention layer, {name} ({kind}) has "
                "none; as-cached works without"
            )
        if sizes != heads:
            raise ValueError(
                f"{_FLAG}: {name} ({kind}) rotates a part of {sizes} dims "
                f"placed by the model itself in heads of {heads}; as-cached works"
            )
        flag = _SCALES_ROTATED_KEYS.get(kind)
        if flag is not None and getattr(owner, flag, True):
            raise ValueError(
                f"{_FLAG}: {name} ({kind}, {flag}) scales keys after "
                "their rotation, so they cannot be rotated any more; as-cached works"
            )
