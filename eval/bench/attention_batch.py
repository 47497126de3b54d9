# SPDX-License-Identifier: Apache-2.0
"""A decode batch on the KV pool of one layer: its shape, the slot of each position, and a check of results."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from sglang_reasoncache.kernels.paged import read_keys, read_rows
from sglang_reasoncache.kernels.rotation import KeyRotation

#: The default length of a run: consecutive tokens that all use the slots of an earlier run.
RUN = 48
#: Settings: the percentage of positions that use an earlier position's slot, and the length of a run.
SHARES = ((0, RUN), (22, RUN), (22, 16), (50, RUN))


@dataclass(frozen=True)
class Shape:
    """``requests`` requests of ``tokens`` tokens each. K and V are ``[slots, kv_heads, head_dim]`` each. If
    ``rotated`` is not 0, KV is latent (MLA): a slot has ``head_dim`` latent, then ``rotated`` rotary dims."""

    requests: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    rotated: int = 0

    def __str__(self) -> str:
        size = f"{self.requests}x{self.tokens}-{self.heads}/{self.kv_heads}x{self.head_dim}"
        return f"{size}+{self.rotated}" if self.rotated else size

    @property
    def query_dim(self) -> int:
        return self.head_dim + self.rotated

    @property
    def slots(self) -> int:
        """The number of slots in the pool, including SGLang's padding slot 0."""
        return 1 + self.requests * self.tokens

    @property
    def layer_bytes(self) -> int:
        """The size of one layer's K and V for all positions, in bytes, if the pool is bf16."""
        dims = self.query_dim if self.rotated else 2 * self.kv_heads * self.head_dim
        return self.requests * self.tokens * dims * 2


def shared_blocks(
    tokens: int, fraction: float, draw: torch.Generator, run: int = RUN
) -> torch.Tensor:
    """Draws random blocks of ``run`` tokens, ``fraction`` of ``tokens`` in all, never the first or last block.
    Pairs each with an earlier block that was not drawn. Returns the pairs' block numbers, ``[2, pairs]``."""
    others = max(0, (tokens - 1) // run - 1)
    shared = torch.zeros(1 + others, dtype=torch.bool)
    count = min(others, round(fraction * tokens / run))
    shared[1 + torch.randperm(others, generator=draw)[:count]] = True
    blocks = shared.nonzero()[:, 0]
    kept = (~shared).nonzero()[:, 0]
    earlier = torch.searchsorted(kept, blocks)
    chosen = torch.rand(count, generator=draw, dtype=torch.float64) * earlier
    return torch.stack([blocks, kept[chosen.long()]])


def lay_rows(shape: Shape, shared_percent: int, run: int = RUN) -> torch.Tensor:
    """The slot of each position, int32 ``[requests, tokens]``. Token t of request r has slot ``1 + t * requests
    + r``, as if all requests had decoded together. A shared block has the slots of an earlier block instead."""
    rows = torch.arange(1, shape.slots, dtype=torch.int32).view(shape.tokens, -1).T.contiguous()
    draw = torch.Generator().manual_seed(5)
    for row in rows:
        pairs = shared_blocks(shape.tokens, shared_percent / 100, draw, run)
        blocks, sources = pairs[..., None] * run + torch.arange(run)
        row[blocks] = row[sources]
    return rows


def cached_positions(shape: Shape) -> torch.Tensor:
    """int32 ``[slots]``: the position for which each slot's key was computed; 0 for the padding."""
    slots = torch.arange(shape.slots, dtype=torch.int32)
    return ((slots - 1) // shape.requests).clamp_(min=0)


def rotation(length: int, dim: int, is_neox: bool = True) -> KeyRotation:
    """A rotary embedding of ``dim`` dims with base 10,000 and a table of ``length`` positions."""
    angles = torch.arange(length)[:, None] * 1e4 ** -(torch.arange(0, dim, 2) / dim)
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=-1), dim, is_neox)


class Batch:
    """Requests of one shape. ``pool`` is K and V of a layer, each ``[slots, kv_heads, head_dim]``. With MLA, K
    has only the rotary dims, and V only the latent dims. A subclass adds the calls that are timed."""

    #: The largest allowed difference from fp32 attention, relative to the norm of fp32 attention.
    tolerance: ClassVar[float]

    def __init__(self, shape: Shape, pool: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.shape = shape
        self.pool = pool
        self.device = pool[0].device
        self.scale = shape.query_dim**-0.5
        query = torch.randn(shape.requests, shape.heads, shape.query_dim)
        self.query = query.to(self.device, torch.bfloat16)
        self.cached_at = cached_positions(shape).to(self.device)
        self.requests = torch.arange(shape.requests, device=self.device)
        self.lengths = torch.full((shape.requests,), shape.tokens, device=self.device)
        self.own_rows = self.rows = lay_rows(shape, 0).to(self.device)
        dim = shape.rotated or shape.head_dim
        self.rotation = rotation(shape.tokens, dim, not shape.rotated).to(self.device)
        #: The first, a middle and the last request. Their results are compared with PyTorch's.
        self.checked = sorted({0, (shape.requests - 1) // 2, shape.requests - 1})

    def share(self, percent: int, run: int = RUN) -> None:
        """Let ``percent`` of the positions share slots. A subclass raises RuntimeError if a result is wrong."""
        self.rows = lay_rows(self.shape, percent, run).to(self.device)
        self.shares = not torch.equal(self.rows, self.own_rows)

    def check(self, name: str, output: torch.Tensor, rows: torch.Tensor) -> None:
        """Raises RuntimeError if ``output`` ``[requests, heads, head_dim]`` differs from fp32 attention over
        ``rows`` by more than ``tolerance``."""
        query = self.query[self.checked].float().unflatten(1, (self.shape.kv_heads, -1))
        k, v = (side.transpose(1, 2) for side in self.read(rows[self.checked]))
        expected = F.scaled_dot_product_attention(query, k, v, scale=self.scale)
        size = (len(self.checked), -1)
        output, expected = (
            result.double().reshape(size) for result in (output[self.checked], expected)
        )
        error = float(((output - expected).norm(dim=1) / expected.norm(dim=1)).max())
        if not error <= self.tolerance:  # also true for NaN
            raise RuntimeError(f"{name}, {self.shape}: relative error {error:.3g}")

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 keys ``[rows, tokens, kv_heads, query_dim]`` and values ``[..., head_dim]`` of ``rows``."""
        slots = rows.long()
        at = torch.arange(slots.shape[1], dtype=torch.int32, device=self.device)
        keys, values = self.pool
        shift = at - self.cached_at[slots]
        k = read_keys(keys, slots, shift, self.rotation)
        v = read_rows(values, slots)
        return torch.cat((v, k), dim=3) if self.shape.rotated else k, v
