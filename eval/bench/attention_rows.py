# SPDX-License-Identifier: Apache-2.0
"""What the attention benchmarks measure: batches, where their tokens lie, what is shared."""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass

import torch

#: Tokens of a shared block.
BLOCK = 16
_SEED = 5


@dataclass(frozen=True)
class Shape:
    """``requests`` of ``tokens`` each; a bf16 pool with K and V of ``[slots, kv_heads, head_dim]``."""

    requests: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.tokens}-{self.heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def slots(self) -> int:
        """Of the pool: slot 0 is SGLang's padding."""
        return 1 + self.requests * self.tokens

    @property
    def entry_bytes(self) -> int:
        """K and V of a token in one layer."""
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def layer_bytes(self) -> int:
        """K and V of all entries in one layer."""
        return self.requests * self.tokens * self.entry_bytes


def shared_blocks(tokens: int, fraction: float, draw: random.Random) -> list[tuple[int, int]]:
    """(block, earlier block of its own) pairs that cover ``fraction`` of the tokens.

    Neither the first block nor that of the newest token is shared, so a row of less than
    three blocks has nothing to share, and no row shares more than those between.
    """
    blocks = range(1, (tokens - 1) // BLOCK)
    chosen = set(draw.sample(blocks, min(len(blocks), round(fraction * tokens / BLOCK))))
    kept = [block for block in (0, *blocks) if block not in chosen]
    return [
        (block, kept[draw.randrange(bisect.bisect_left(kept, block))]) for block in sorted(chosen)
    ]


def lay_rows(shape: Shape, shared_percent: int) -> torch.Tensor:
    """int32 ``[requests, tokens]``, the slot of each position, as ``req_to_token`` holds it.

    Token t of request r lies in slot ``1 + t * requests + r``, as decoding together leaves
    it, and was computed there (:func:`cached_positions`). So much of each row is in blocks that
    lie at the slots of earlier blocks; the slots that sharing frees stay empty.
    """
    at = torch.arange(shape.tokens, dtype=torch.int32)
    rows = 1 + torch.arange(shape.requests, dtype=torch.int32)[:, None] + at * shape.requests
    draw = random.Random(_SEED)
    for row in rows:
        pairs = shared_blocks(shape.tokens, shared_percent / 100, draw)
        if not pairs:
            continue
        blocks, sources = torch.tensor(pairs).T[..., None] * BLOCK + torch.arange(BLOCK)
        row[blocks] = row[sources]
    return rows


def cached_positions(shape: Shape) -> torch.Tensor:
    """int32 ``[slots]``: the position each slot's key was computed for; 0 for the padding."""
    slots = torch.arange(shape.slots, dtype=torch.int32)
    return ((slots - 1) // shape.requests).clamp_(min=0)
