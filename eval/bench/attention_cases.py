# SPDX-License-Identifier: Apache-2.0
"""What the attention benchmark measures: shapes of batches, and how their rows lie in a pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

#: Tokens of a shared block.
BLOCK = 16
SEED = 5


@dataclass(frozen=True)
class Shape:
    """``requests`` of ``tokens`` each; a bf16 pool with K and V of ``[slots, kv_heads, head_dim]``."""

    requests: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.requests}x{self.tokens}-{self.heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def slots(self) -> int:
        """Of the pool: slot 0 is SGLang's padding."""
        return 1 + self.requests * self.tokens

    @property
    def layer_bytes(self) -> int:
        """K and V of all entries in one layer."""
        return self.requests * self.tokens * 2 * self.kv_heads * self.head_dim * 2


Axis = Literal["", "tokens", "requests", "shared_percent"]


@dataclass(frozen=True)
class Setting:
    """A point to measure: on the curve over ``axis``, or a line of the table with ""."""

    axis: Axis
    shape: Shape
    shared_percent: int

    @property
    def curve(self) -> str:
        """The name of our curve that it lies on."""
        if self.axis == "shared_percent" or not self.shared_percent:
            return "ours"
        return f"ours, {self.shared_percent}% shared"


_HEADS = ((4, 2, 64), (32, 8, 128))
#: Lines of each device's table; results are named after 32x1000 and 64x16000.
TABLE = {
    "cpu": tuple(Shape(*size, *heads) for size in ((32, 1000), (8, 16_000)) for heads in _HEADS),
    "cuda": (Shape(64, 16_000),),
}
#: Shapes of each curve; neighbours that are equal are measured on the same pool.
_CURVES: dict[str, dict[Axis, list[Shape]]] = {
    "cpu": {
        "tokens": [Shape(8, tokens) for tokens in (250, 1000, 4000, 16_000)],
        "requests": [Shape(requests, 1000) for requests in (1, 4, 16, 64)],
        "shared_percent": [Shape(32, 1000)],
    },
    "cuda": {
        "tokens": [Shape(64, tokens) for tokens in (1000, 4000, 16_000, 32_000)],
        "requests": [Shape(requests, 16_000) for requests in (1, 8, 32, 128)],
        "shared_percent": [Shape(64, 16_000)],
    },
}


def growth(device: str) -> list[Setting]:
    """The points of a device's curves over tokens, requests and shared entries."""
    return [
        Setting(axis, shape, percent)
        for axis, shapes in _CURVES[device].items()
        for shape in shapes
        for percent in ((0, 10, 22, 35, 50, 75) if axis == "shared_percent" else (0, 22))
    ]


def shared_blocks(tokens: int, fraction: float, draw: np.random.Generator) -> np.ndarray:
    """``[2, pairs]``: blocks that cover ``fraction`` of the tokens, and an earlier one of each.

    Earlier ones are not shared themselves. Neither is the first block nor that of the newest
    token, so a row of less than three blocks has nothing to share.
    """
    blocks = np.arange((tokens - 1) // BLOCK)
    count = min(max(0, len(blocks) - 1), round(fraction * tokens / BLOCK))
    chosen = np.sort(draw.choice(blocks[1:], count, replace=False))
    kept = np.setdiff1d(blocks, chosen)
    return np.stack([chosen, kept[draw.integers(np.searchsorted(kept, chosen))]])


def lay_rows(shape: Shape, shared_percent: int) -> torch.Tensor:
    """int32 ``[requests, tokens]``, the slot of each position, as ``req_to_token`` holds it.

    Token t of request r lies in slot ``1 + t * requests + r``, as decoding together leaves
    it, and was computed there (:func:`cached_positions`). So much of each row is in blocks that
    lie at the slots of earlier blocks; the slots that sharing frees stay empty.
    """
    rows = torch.arange(1, shape.slots, dtype=torch.int32).view(shape.tokens, -1).T.contiguous()
    draw = np.random.default_rng(SEED)
    for row in rows:
        pairs = torch.from_numpy(shared_blocks(shape.tokens, shared_percent / 100, draw))
        blocks, sources = pairs[..., None] * BLOCK + torch.arange(BLOCK)
        row[blocks] = row[sources]
    return rows


def cached_positions(shape: Shape) -> torch.Tensor:
    """int32 ``[slots]``: the position each slot's key was computed for; 0 for the padding."""
    slots = torch.arange(shape.slots, dtype=torch.int32)
    return ((slots - 1) // shape.requests).clamp_(min=0)
