# SPDX-License-Identifier: Apache-2.0
"""What was measured on a GPU, as a table and by the names of the goals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.bench.attention_rows import Shape
from eval.bench.quartiles import Quartiles

HEADS = (32, 8, 128)
#: What the result is named after.
SHAPE = Shape(64, 16_000, *HEADS)
#: Layers of the model whose step the planner is compared with; it runs once for all.
_LAYERS = 32


@dataclass(frozen=True)
class Row:
    """One setting; times are medians over all calls of all rounds, with quartiles, in ms.

    Attributes:
        ours: Entries in order of positions, as servers read them.
        flashinfer: The same tokens, unshared, each request's own.
        flashinfer_as_cached: The shared rows, as if nothing had moved; None if nothing has.
        plan: Ours, once for all layers.
        gather: All entries copied out, keys rotated.
        copy_gb_per_s: Of the device, bytes read and written.
        decode_gb_per_s: K and V of every entry, once, over our time.
        gather_gb_per_s: The same read and written.
    """

    shape: str
    shared_percent: int
    ours: Quartiles
    flashinfer: Quartiles
    flashinfer_as_cached: Quartiles | None
    plan: Quartiles
    gather: Quartiles
    copy_gb_per_s: Quartiles
    decode_gb_per_s: float
    gather_gb_per_s: float

    @property
    def plan_of_step(self) -> float:
        """The planner's share of plan and attention of a model with so many layers."""
        return self.plan.median / (self.plan.median + _LAYERS * self.ours.median)


def print_rows(rows: Sequence[Row]) -> None:
    print(
        "\n| requests x tokens - heads/KV heads x dim | shared | ours, ms "
        "| FlashInfer unshared, ms | FlashInfer as cached, ms | GB/s | of copy | plan, us "
        "| of a step | gather, GB/s |"
    )
    print("|" + " --- |" * 10)
    for row in rows:
        sides = (row.ours, row.flashinfer, row.flashinfer_as_cached)
        times = " | ".join("" if ms is None else ms.text(3) for ms in sides)
        copy = row.copy_gb_per_s.median
        print(
            f"| {row.shape} | {row.shared_percent}% | {times} | {row.decode_gb_per_s:.0f} "
            f"| {row.decode_gb_per_s / copy:.2f} of {copy:.0f} | {row.plan.median * 1e3:.0f} "
            f"| {row.plan_of_step:.3f} | {row.gather_gb_per_s:.0f} |"
        )


def key_figures(rows: Sequence[Row]) -> dict[str, float]:
    """By the names of the goals: FlashInfer's time over ours unshared (at least 0.95), ours over
    FlashInfer's with 22% shared (at most 0.85), and the rest as fractions."""
    found: dict[str, float] = {}
    for row in rows:
        if row.shape != str(SHAPE):
            continue
        if row.shared_percent == 0:
            found["decode_vs_flashinfer"] = row.flashinfer.median / row.ours.median
            found["decode_fraction_of_copy"] = row.decode_gb_per_s / row.copy_gb_per_s.median
            found["gather_fraction_of_copy"] = row.gather_gb_per_s / row.copy_gb_per_s.median
        if row.shared_percent == 22:
            found["decode_shared22_vs_flashinfer"] = row.ours.median / row.flashinfer.median
            found["plan_fraction_of_step"] = row.plan_of_step
    return found
