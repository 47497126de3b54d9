# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention_cuda``: decode attention on a GPU, ours against FlashInfer's.

One layer's bf16 pool, slots as requests that decode together get them, every call after the
L2 cache was emptied, sides in turn, the copy bandwidth of the device in between. FlashInfer
reads pages of one token and plans outside of the timing. Each kernel's result is compared
with the fp32 reference on a few requests before it is timed. Prints Markdown tables and
writes the figures to ``--json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eval.bench.attention_cuda_rig import GpuStep
from eval.bench.attention_cuda_rows import HEADS, SHAPE, Row, key_figures, print_rows
from eval.bench.attention_growth import Point, Setting, curve_of, settings
from eval.bench.attention_rows import Shape
from eval.bench.bandwidth import Yardstick
from eval.bench.distance import Shape as Pool
from eval.bench.distance import read_rates
from eval.bench.quartiles import Quartiles

SHARED = (0, 22, 50)
GROWTH = settings(
    [Shape(64, tokens, *HEADS) for tokens in (1000, 4000, 16_000, 32_000)],
    [Shape(requests, 16_000, *HEADS) for requests in (1, 8, 32, 128)],
    (SHAPE, (0, 10, 22, 35, 50, 75)),
)
#: Beside a pool: FlashInfer's workspace, the yardstick's arrays, copies of `gather`.
_SPARE_BYTES = 8 << 30
_YARDSTICK_GB = 2.0
#: What a round times of each side, in ms.
_ROUND_MS = 100.0

Call = Callable[[], object]


def take_turns(
    calls: Mapping[str, Call], yardstick: Yardstick, rounds: int
) -> dict[str, Quartiles]:
    """ms of each call by CUDA events, and under "copy" the GB/s in between."""
    from triton.testing import do_bench

    found: dict[str, list[float]] = {name: [] for name in (*calls, "copy")}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            # Empties the L2 cache before each call, which also hides the launch.
            found[name] += do_bench(calls[name], rep=_ROUND_MS, return_mode="all")
            found["copy"].append(yardstick.copy())
    return {name: Quartiles.of(values) for name, values in found.items()}


def measure(step: GpuStep, percent: int, rounds: int, yardstick: Yardstick) -> Row:
    """All operations on one batch.

    Raises:
        RuntimeError: a kernel's result is not the reference's.
    """
    step.share(percent)
    step.check()
    calls: dict[str, Call] = {
        "ours": step.decode,
        "flashinfer": step.flashinfer(as_cached=False),
        "plan": step.plan,
        "gather": step.gather,
    }
    if percent:
        calls["as cached"] = step.flashinfer(as_cached=True)
    took = take_turns(calls, yardstick, rounds)
    size = step.shape.layer_bytes / 1e6
    return Row(
        shape=str(step.shape),
        shared_percent=percent,
        ours=took["ours"],
        flashinfer=took["flashinfer"],
        flashinfer_as_cached=took.get("as cached"),
        plan=took["plan"],
        gather=took["gather"],
        copy_gb_per_s=took["copy"],
        decode_gb_per_s=size / took["ours"].median,
        gather_gb_per_s=2 * size / took["gather"].median,
    )


def measure_growth(wanted: Sequence[Setting], rounds: int, yardstick: Yardstick) -> list[Point]:
    """Decode attention alone, each setting that fits into the device's memory, as a table."""
    print("\n| growth over | shape | shared | ours, ms | FlashInfer, ms |")
    print("|" + " --- |" * 5)
    points: list[Point] = []
    for shape, group in itertools.groupby(wanted, key=lambda setting: setting.shape):
        if _too_large(shape):
            print(f"| {next(group).axis} | {shape} | | not enough memory | |", flush=True)
            continue
        points += _measure_curves(GpuStep(shape), list(group), rounds, yardstick)
    return points


def _measure_curves(
    step: GpuStep, wanted: Sequence[Setting], rounds: int, yardstick: Yardstick
) -> list[Point]:
    points = []
    for setting in wanted:
        step.share(setting.shared_percent)
        step.check()
        name = curve_of(setting)
        calls: dict[str, Call] = {name: step.decode, "FlashInfer": step.flashinfer(as_cached=False)}
        took = take_turns(calls, yardstick, rounds)
        # Reading is at least as fast as a copy, which counts both directions.
        read_ms = step.shape.layer_bytes / took.pop("copy").median / 1e6
        ours, other = took[name], took["FlashInfer"]
        points.append(Point(setting, took if name == "ours" else {name: ours}, read_ms))
        print(
            f"| {setting.axis} | {setting.shape} | {setting.shared_percent}% | {ours.text(3)} "
            f"| {other.text(3)} |",
            flush=True,
        )
    return points


def distance_of_copy(device: torch.device, runs: int) -> float:
    """Worse of as cached and corrected, 256 pairs of 16 interleaved tokens, over copy bandwidth."""
    found = read_rates(
        Pool(layers=32, heads=8, head_dim=128, slots=32_768), ["triton"], device, runs
    )
    many = [r for r in found if (r.order, r.pairs, r.block) == ("interleaved", 256, 16)]
    print("\n| distance, 256 pairs x 16 tokens | GB/s | copy, GB/s | of copy |")
    print("|" + " --- |" * 4)
    for row in many:
        keys = "corrected" if row.corrected else "as cached"
        print(f"| {keys} | {row.gb_per_s:.0f} | {row.copy_gb_per_s:.0f} | {row.of_copy:.2f} |")
    return min(row.of_copy for row in many)


def figures(rounds: int, growth: bool) -> Iterator[dict[str, Any]]:
    """Measure and print part by part, and hand out each part's figures by name."""
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    yield {"device": name}
    print(f"\n{name}, bf16, {HEADS[0]} heads over {HEADS[1]} KV heads of {HEADS[2]}")
    if _too_large(SHAPE):
        raise SystemExit(f"{SHAPE} needs {_needed(SHAPE) / 1e9:.0f} GB of the GPU's free memory")
    yardstick = Yardstick(device, _YARDSTICK_GB)
    step = GpuStep(SHAPE)
    rows = [measure(step, percent, rounds, yardstick) for percent in SHARED]
    del step
    print_rows(rows)
    as_rows = [{**asdict(row), "plan_of_step": row.plan_of_step} for row in rows]
    yield {**key_figures(rows), "rows": as_rows}
    yield {"distance_fraction_of_copy": distance_of_copy(device, runs=8)}
    if growth:
        points = measure_growth(GROWTH, rounds, yardstick)
        yield {"growth": [asdict(point) for point in points]}


def _needed(shape: Shape) -> int:
    # The pool, and what `gather` copies out of it.
    return 2 * shape.slots * shape.entry_bytes + _SPARE_BYTES


def _too_large(shape: Shape) -> bool:
    # PyTorch keeps what a smaller pool took until it is asked for it.
    torch.cuda.empty_cache()
    return _needed(shape) > torch.cuda.mem_get_info()[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.attention_cuda", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=5, help="Rounds a setting (default 5).")
    parser.add_argument("--growth", action="store_true", help="Also the curves.")
    parser.add_argument("--json", type=Path, help="Write all figures here.")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if not torch.cuda.is_available():
        parser.exit(2, f"no CUDA device is visible to torch {torch.__version__}\n")
    results: dict[str, Any] = {}
    with torch.inference_mode():
        for part in figures(options.rounds, options.growth):
            results |= part
            if options.json is not None:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
