# SPDX-License-Identifier: Apache-2.0
"""A batch of decode requests on one pool, and the rounds in which its sides take turns."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pandas as pd
import torch

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.rotation import KeyRotation

#: Tokens of a shared block.
BLOCK = 16
_SEED = 5
#: Requests whose result is compared with the reference.
_CHECKED = 3

#: Runs once; returns its samples, each a dictionary of figures.
Side = Callable[[], Sequence[Mapping[str, float]]]
#: What one setting's samples come to: JSON, times as :func:`spread`.
Row = dict[str, Any]


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
        if pairs:
            blocks, sources = torch.tensor(pairs).T[..., None] * BLOCK + torch.arange(BLOCK)
            row[blocks] = row[sources]
    return rows


def cached_positions(shape: Shape) -> torch.Tensor:
    """int32 ``[slots]``: the position each slot's key was computed for; 0 for the padding."""
    slots = torch.arange(shape.slots, dtype=torch.int32)
    return ((slots - 1) // shape.requests).clamp_(min=0)


class Rig:
    """One batch and one pool; a subclass adds the sides that attend it.

    Args:
        shape: Of the batch and the pool.
        device: Of the pool; None: :attr:`device_type`.
    """

    device_type: ClassVar[str]
    #: Heading and digits of each column of the table, by its key in a row.
    columns: ClassVar[Mapping[str, tuple[str, int]]]
    #: Names of our time and the other side's in a row, and of the bandwidth in between.
    times: ClassVar[tuple[str, str]]
    bandwidth: ClassVar[str]
    #: Of the arrays that the bandwidth is measured with.
    yardstick_gb: ClassVar[float]
    #: The other side in the picture.
    other: ClassVar[str]
    warm_up_rounds: ClassVar[int]
    #: Largest difference from fp32 attention, relative to its norm.
    tolerance: ClassVar[float]

    def __init__(self, shape: Shape, device: str | None = None) -> None:
        torch.manual_seed(_SEED)
        self.shape, self.device = shape, torch.device(device or self.device_type)
        self.pool = self.make_pool()
        dim = shape.head_dim
        angles = torch.arange(shape.tokens)[:, None] * 1e4 ** -(torch.arange(0, dim, 2) / dim)
        self.rotation = KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=-1), dim, True)
        self.scale = dim**-0.5
        query = torch.randn(shape.requests, shape.heads, dim)
        self.query = query.to(self.device, torch.bfloat16)
        self.cached_at = cached_positions(shape).to(self.device)
        self.requests = torch.arange(shape.requests, device=self.device)
        self.lengths = torch.full((shape.requests,), shape.tokens, device=self.device)
        self.own_rows = self.rows = lay_rows(shape, 0).to(self.device)
        self.shared_percent = 0
        self.reference = PagedKv(*self.pool, self.rotation, backend="torch")

    def make_pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, ``[slots, kv_heads, head_dim]`` bf16 each."""
        raise NotImplementedError

    @staticmethod
    def fits(shape: Shape) -> bool:
        """Whether the device has memory for it."""
        return True

    @staticmethod
    def key_figures(rows: Sequence[Row]) -> dict[str, float]:
        """What the result is named after."""
        raise NotImplementedError

    def share(self, percent: int) -> None:
        """Lay the rows anew, so much of each in blocks at the slots of earlier blocks.

        Raises:
            RuntimeError: a result is not the reference's.
        """
        self.shared_percent = percent
        self.rows = lay_rows(self.shape, percent).to(self.device)

    def sides(self, curves_only: bool) -> dict[str, Side]:
        """What takes turns; with ``curves_only`` just what the curves show."""
        raise NotImplementedError

    def row(self, samples: pd.DataFrame) -> Row:
        """What the samples of :func:`take_turns` come to."""
        raise NotImplementedError

    def check(
        self, name: str, found: torch.Tensor, rows: torch.Tensor, as_cached: bool = False
    ) -> None:
        """Compare some requests with fp32 attention.

        Args:
            name: Of the side, for the message.
            found: ``[requests, heads, head_dim]``.
            rows: What the side read.
            as_cached: Whether it read keys without rotating them.

        Raises:
            RuntimeError: they differ by more than :attr:`tolerance`.
        """
        for request in self.some():
            plan = self.plan_of(rows[request : request + 1], as_cached)
            query = self.query[request : request + 1].float()
            expected = decode_attention(query, self.reference, plan, scale=self.scale)
            self.judge(name, found[request : request + 1], expected)

    def plan_of(self, rows: torch.Tensor, as_cached: bool = False) -> RowPlan:
        """What whole rows read, by definition."""
        count, tokens = rows.shape
        indptr = torch.arange(count + 1, dtype=torch.int32, device=self.device) * tokens
        at = torch.arange(tokens, dtype=torch.int32, device=self.device)
        shift = (at - self.cached_at[rows.long()]).flatten()
        rotates = not as_cached and bool(shift.any())
        return RowPlan(indptr, rows.flatten(), shift if rotates else None)

    def judge(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raises RuntimeError where ``found`` is not near enough."""
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        if not error <= self.tolerance:  # NaN is not
            raise RuntimeError(f"{name}, {self.shape}: relative error {error:.3g}")

    def some(self) -> list[int]:
        """First, last and requests between."""
        last = self.shape.requests - 1
        return sorted({last * part // (_CHECKED - 1) for part in range(_CHECKED)})


def take_turns(
    sides: Mapping[str, Side], bandwidth: Callable[[], float], rounds: int, warm_up_rounds: int = 0
) -> pd.DataFrame:
    """Samples of all rounds, one a line: ``side``, ``round``, ``bandwidth`` behind it, figures."""
    lines = []
    for number in range(warm_up_rounds + rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            samples, rate = sides[name](), bandwidth()
            if number >= warm_up_rounds:
                about = {"side": name, "round": number, "bandwidth": rate}
                lines += [{**about, **sample} for sample in samples]
    return pd.DataFrame(lines)


def spread(values: pd.Series) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = values.quantile([0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high)}


def text(figure: Any, digits: int = 0) -> str:
    """``median (low to high)`` of a :func:`spread`, a rounded number, or the text; "" for None."""
    if figure is None or isinstance(figure, str):
        return figure or ""
    if not isinstance(figure, dict):
        return f"{figure:.{digits}f}"
    median, low, high = (f"{figure[name]:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"
