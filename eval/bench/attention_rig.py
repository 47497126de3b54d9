# SPDX-License-Identifier: Apache-2.0
"""A batch of decode requests on one pool, and the loop that times it in every setting."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, ClassVar

import pandas as pd
import torch

from eval.bench.attention_cases import SEED, Setting, Shape, cached_positions, lay_rows
from eval.bench.bandwidth import Yardstick
from eval.bench.turns import Side, as_text, spread, take_turns
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.rotation import KeyRotation

#: What one setting's samples come to: JSON, times as :func:`eval.bench.turns.spread`.
Row = dict[str, Any]


def rotation(length: int, dim: int) -> KeyRotation:
    """Rotary embedding of whole heads, base 10,000, with a table of ``length`` positions."""
    angles = torch.arange(length)[:, None] * 1e4 ** -(torch.arange(0, dim, 2) / dim)
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=-1), dim, True)


class Rig:
    """One batch and one pool; a subclass adds the sides that attend it.

    Args:
        shape: Of the batch and the pool.
        device: Of the pool; None: :attr:`device_type`.
    """

    device_type: ClassVar[str]
    #: Heading and digits of each column of the table, by its key in a row.
    columns: ClassVar[Mapping[str, tuple[str, int]]]
    #: Keys of our time and the other side's; the latter's name in the picture.
    times: ClassVar[tuple[str, str, str]]
    #: "read" or "copy", what is measured in between, and GB of the arrays.
    bandwidth: ClassVar[tuple[str, float]]
    warm_up_rounds: ClassVar[int]
    #: Largest difference from fp32 attention, relative to its norm.
    tolerance: ClassVar[float]

    def __init__(self, shape: Shape, device: str | None = None) -> None:
        torch.manual_seed(SEED)
        self.shape, self.device = shape, torch.device(device or self.device_type)
        self.pool = self.make_pool()
        self.rotation = rotation(shape.tokens, shape.head_dim)
        self.scale = shape.head_dim**-0.5
        query = torch.randn(shape.requests, shape.heads, shape.head_dim)
        self.query = query.to(self.device, torch.bfloat16)
        self.cached_at = cached_positions(shape).to(self.device)
        self.requests = torch.arange(shape.requests, device=self.device)
        self.lengths = torch.full((shape.requests,), shape.tokens, device=self.device)
        self.own_rows = self.rows = lay_rows(shape, 0).to(self.device)
        self.shared_percent = 0
        self.reference = PagedKv(*self.pool, self.rotation, backend="torch")
        #: First, last and one between: their results are compared with the reference.
        last = shape.requests - 1
        self.checked = sorted({0, last // 2, last})

    def make_pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, ``[slots, kv_heads, head_dim]`` bf16 each."""
        raise NotImplementedError

    @staticmethod
    def prepared() -> AbstractContextManager[object]:
        """What has to hold while the rig is made and measured."""
        return nullcontext()

    @staticmethod
    def key_figures(rows: Sequence[Row]) -> dict[str, float]:
        """What the result is named after."""
        raise NotImplementedError

    @staticmethod
    def fits(shape: Shape) -> bool:
        """Whether the device has memory for it."""
        return True

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
        """What the samples of all rounds come to."""
        raise NotImplementedError

    def check(
        self, name: str, found: torch.Tensor, rows: torch.Tensor, as_cached: bool = False
    ) -> None:
        """Compare ``found``, ``[requests, heads, head_dim]``, with fp32 attention over ``rows``.

        Raises:
            RuntimeError: a request differs by more than :attr:`tolerance`.
        """
        query, plan = self.query[self.checked].float(), self.plan_of(rows[self.checked], as_cached)
        expected = decode_attention(query, self.reference, plan, scale=self.scale)
        self.judge(name, found[self.checked], expected)

    def judge(self, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raises RuntimeError where a checked request's ``found`` is not near enough."""
        size = (len(self.checked), -1)
        found, expected = (one.double().reshape(size) for one in (found, expected))
        error = float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
        if not error <= self.tolerance:  # NaN is not
            raise RuntimeError(f"{name}, {self.shape}: relative error {error:.3g}")

    def plan_of(self, rows: torch.Tensor, as_cached: bool = False) -> RowPlan:
        """What whole rows read, by definition; ``as_cached`` without rotating keys."""
        count, tokens = rows.shape
        indptr = torch.arange(count + 1, dtype=torch.int32, device=self.device) * tokens
        at = torch.arange(tokens, dtype=torch.int32, device=self.device)
        shift = (at - self.cached_at[rows.long()]).flatten()
        rotates = not as_cached and bool(shift.any())
        return RowPlan(indptr, rows.flatten(), shift if rotates else None)


def measure(rig: type[Rig], wanted: Sequence[Setting], rounds: int) -> list[Row]:
    """Every setting that fits into the device's memory, printed as a Markdown table.

    Returns:
        Rows; of settings on a curve points (:func:`point`).
    """
    kind, gigabytes = rig.bandwidth
    yardstick = Yardstick(torch.device(rig.device_type), gigabytes)
    found: list[Row] = []
    lines: list[dict[str, str]] = []
    for shape, group in itertools.groupby(wanted, key=lambda setting: setting.shape):
        batch = rig(shape) if rig.fits(shape) else None
        for setting in group:
            row: Row = {"shape": str(shape), "shared_percent": setting.shared_percent}
            line: dict[str, str] = {"growth over": setting.axis} if setting.axis else {}
            if batch is not None:
                print(f"{setting.axis} {shape}, {setting.shared_percent}%", file=sys.stderr)
                batch.share(setting.shared_percent)
                sides = batch.sides(curves_only=bool(setting.axis))
                samples = take_turns(sides, rounds, rig.warm_up_rounds, yardstick.rates)
                samples = samples.rename(columns={kind: "bandwidth"})
                row |= batch.row(samples) | {f"{kind}_gb_per_s": spread(samples["bandwidth"])}
                found.append(point(rig, setting, row) if setting.axis else row)
            shown = ("shape", "shared_percent", *rig.times[:2]) if setting.axis else rig.columns
            for name in shown:
                head, digits = rig.columns[name]
                line[head] = as_text(row.get(name, "no memory"), digits)
            lines.append(line)
        del batch
    print("\n" + pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True), flush=True)
    return found


def point(rig: type[Rig], setting: Setting, row: Row) -> Row:
    """Of a curve: ``setting``, ``ms`` by curve, and ``read_ms``, what reading each entry's K and
    V once takes at the machine's bandwidth."""
    ours, theirs, other = rig.times
    # The other side reads shared entries like any other: one curve of it is enough.
    others = {other: row[theirs]} if setting.curve == "ours" else {}
    ms = {setting.curve: row[ours], **others}
    read_ms = setting.shape.layer_bytes / row[f"{rig.bandwidth[0]}_gb_per_s"]["median"] / 1e6
    return {"setting": asdict(setting), "ms": ms, "read_ms": read_ms}
