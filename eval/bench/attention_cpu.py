# SPDX-License-Identifier: Apache-2.0
"""Decode attention on the CPU: our backend and SGLang's torch-native, round by round in turn."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eval.bench.attention_growth import Point, Setting, curve_of, settings
from eval.bench.attention_rig import Step
from eval.bench.attention_rows import Shape
from eval.bench.bandwidth import Yardstick
from eval.bench.quartiles import Quartiles

#: Those of 32 requests are the ones the result is named after.
SHAPES = tuple(
    Shape(requests, tokens, *heads)
    for requests, tokens in ((32, 1000), (8, 16_000))
    for heads in ((4, 2, 64), (32, 8, 128))
)
_HEADS = (32, 8, 128)
GROWTH = settings(
    [Shape(8, tokens, *_HEADS) for tokens in (250, 1000, 4000, 16_000)],
    [Shape(requests, 1000, *_HEADS) for requests in (1, 4, 16, 64)],
    (Shape(32, 1000, *_HEADS), (0, 10, 22, 35, 50, 75)),
)
#: Of the arrays of the yardstick, which runs before every step and leaves nothing of the pool
#: in the caches.
_GIGABYTES = 1.0


@dataclass(frozen=True)
class Row:
    """One setting. Steps are the plan and all layers; GB/s counts every entry's K and V once.

    Attributes:
        plan_us: What our backend does once for a step, cached positions included.
        decode_ms: Our time of one layer.
        native_ms: SGLang's; it reads shared entries as cached.
        native_threads: With which it was faster, one or all. PyTorch's threads wait for each
            other at every small operator, which on a busy machine takes longer than the work.
        speedup: SGLang's step over ours, of the same round.
        read_gb_per_s: The machine's, in between.
    """

    shape: str
    layers: int
    shared_percent: int
    plan_us: Quartiles
    decode_ms: Quartiles
    native_ms: Quartiles
    native_threads: int
    speedup: Quartiles
    gb_per_s: float
    read_gb_per_s: Quartiles

    @property
    def of_read(self) -> float:
        return self.gb_per_s / self.read_gb_per_s.median


def measure(step: Step, percent: int, rounds: int, yardstick: Yardstick) -> Row:
    """Steps of both backends in turn, SGLang's with one thread and with all; one round warms up."""
    step.share(percent)
    threads = torch.get_num_threads()
    sides = [(step.ours, threads), *((step.native, count) for count in sorted({1, threads}))]
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    reads: list[float] = []
    try:
        for number in range(rounds + 1):
            order = list(enumerate(sides))
            for index, (backend, count) in order if number % 2 else order[::-1]:
                torch.set_num_threads(count)
                took = step.seconds(backend)
                torch.set_num_threads(threads)
                read = yardstick.read()
                if number:
                    times[index].append(took)
                    reads.append(read)
    finally:
        torch.set_num_threads(threads)
    layers, ours = step.layers, times[0]
    decode = Quartiles.of([decode / layers * 1e3 for _, decode in ours])
    best = min(range(1, len(sides)), key=lambda i: statistics.median(map(sum, times[i])))
    return Row(
        shape=str(step.shape),
        layers=layers,
        shared_percent=percent,
        plan_us=Quartiles.of([plan * 1e6 for plan, _ in ours]),
        decode_ms=decode,
        native_ms=Quartiles.of([native / layers * 1e3 for _, native in times[best]]),
        native_threads=sides[best][1],
        speedup=Quartiles.of([sum(b) / sum(a) for a, b in zip(ours, times[best], strict=True)]),
        gb_per_s=step.shape.layer_bytes / decode.median / 1e6,
        read_gb_per_s=Quartiles.of(reads),
    )


def measure_table(shapes: Sequence[Shape], shared: Sequence[int], rounds: int) -> list[Row]:
    """Every shape with every share of shared entries, printed row by row as a Markdown table."""
    print(
        "\n| requests x tokens - heads/KV heads x dim | layers | shared | plan, us | ours, ms a layer "
        "| torch-native, ms a layer | its threads | speed-up of a step | GB/s | of read bandwidth |"
    )
    print("|" + " --- |" * 10)
    rows = []
    with _backends() as yardstick:
        for shape in shapes:
            step = Step(shape)
            for percent in shared:
                row = measure(step, percent, rounds, yardstick)
                rows.append(row)
                print(
                    f"| {row.shape} | {row.layers} | {row.shared_percent}% | {row.plan_us.text(0)} "
                    f"| {row.decode_ms.text(3)} | {row.native_ms.text(3)} | {row.native_threads} "
                    f"| {row.speedup.text(2)} | {row.gb_per_s:.1f} "
                    f"| {row.of_read:.2f} of {row.read_gb_per_s.text(1)} |",
                    flush=True,
                )
    return rows


def measure_growth(wanted: Sequence[Setting], rounds: int) -> list[Point]:
    """Every setting, printed as a Markdown table."""
    print("\n| growth over | shape | shared | ours, ms a layer | torch-native, ms a layer |")
    print("|" + " --- |" * 5)
    points = []
    with _backends() as yardstick:
        for shape, group in itertools.groupby(wanted, key=lambda setting: setting.shape):
            step = Step(shape)
            for setting in group:
                row = measure(step, setting.shared_percent, rounds, yardstick)
                name = curve_of(setting)
                # It reads shared entries like any other, so one curve of it is enough.
                others = {"torch-native": row.native_ms} if name == "ours" else {}
                read_ms = shape.layer_bytes / row.read_gb_per_s.median / 1e6
                points.append(Point(setting, {name: row.decode_ms, **others}, read_ms))
                print(
                    f"| {setting.axis} | {row.shape} | {row.shared_percent}% "
                    f"| {row.decode_ms.text(3)} | {row.native_ms.text(3)} |",
                    flush=True,
                )
    return points


def key_figures(rows: Sequence[Row]) -> dict[str, Any]:
    """At 32 requests x 1,000 tokens, nothing shared; the worse of the head shapes measured."""
    plain = [row for row in rows if row.shape.startswith("32x1000-") and not row.shared_percent]
    if not plain:
        return {}
    return {
        "decode_speedup_vs_torch_native": min(row.speedup.median for row in plain),
        "decode_fraction_of_bandwidth": min(row.of_read for row in plain),
    }


@contextmanager
def _backends() -> Iterator[Yardstick]:
    """SGLang's backends as outside of a server, and the memory bandwidth beside them."""
    from sglang.srt.runtime_context import get_context

    yardstick = Yardstick(torch.device("cpu"), _GIGABYTES)
    with (
        get_context().override_server_args(device="cpu", attention_backend="torch_native"),
        torch.inference_mode(),
    ):
        yield yardstick
