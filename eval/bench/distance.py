# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.distance``: how fast the KV distance reads the pool.

A pool far above the caches; slots interleaved, as SGLang hands them out to 32 requests
that decode together, or scattered one by one, or in runs; new ones in every run, so
nothing is left in a cache by the run before. Bytes are those of K and V that a call
has to read, once. The memory bandwidth is measured in between. Prints Markdown
tables; ``--json`` writes every figure. With a CUDA device the same for its kernel.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eval.bench.bandwidth import Yardstick, seconds
from sglang_reasoncache.kernels.distance import (
    DistanceKernel,
    block_distances,
)
from sglang_reasoncache.kernels.rotation import KeyRotation

_TABLE = 32_768
_SEED = 5
#: Above this the reference's copies of a layer's blocks take long; it is left out.
_REFERENCE_PAIRS = 64
#: How the slots of a block lie in the pool: one of every 32 in a row, a token of each of
#: 32 running requests at a decode step; anywhere; or next to each other.
ORDERS = ("interleaved", "scattered", "runs")
_RUNNING = 32


@dataclass(frozen=True)
class Shape:
    """A pool: bf16, K and V of ``[slots, heads, head_dim]`` a layer."""

    layers: int
    heads: int
    head_dim: int
    slots: int

    @property
    def bytes_per_token(self) -> int:
        return self.layers * 2 * self.heads * self.head_dim * 2


@dataclass(frozen=True)
class Row:
    """One measured setting: best and median run, and the best of the yardstick meanwhile."""

    backend: str
    order: str
    corrected: bool
    pairs: int
    block: int
    best_ms: float
    gb_per_s: float
    median_gb_per_s: float
    copy_gb_per_s: float
    read_gb_per_s: float

    @property
    def of_copy(self) -> float:
        return self.gb_per_s / self.copy_gb_per_s

    @property
    def of_read(self) -> float:
        return self.gb_per_s / self.read_gb_per_s


def make_pool(shape: Shape, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As SGLang lays it out: K and V of a layer are halves of one buffer."""
    torch.manual_seed(_SEED)
    layers = []
    for _ in range(shape.layers):
        both = torch.empty(
            2, shape.slots, shape.heads, shape.head_dim, dtype=torch.bfloat16, device=device
        ).uniform_(-1, 1)
        layers.append((both[0], both[1]))
    return layers


def make_rotation(head_dim: int) -> KeyRotation:
    angles = torch.arange(_TABLE)[:, None] * 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return KeyRotation(torch.cat((angles.cos(), angles.sin()), dim=-1), head_dim, True)


def _by_norms(moments: torch.Tensor) -> torch.Tensor:
    """Squared differences by ``|x|^2 + |y|^2 - 2 x.y``, the paper's form with cached norms."""
    xx, yy, xy = moments.unbind(-1)
    return (xx + yy - 2 * xy).clamp(min=0)


def random_slots(
    shape: Shape, pairs: int, block: int, order: str, device: torch.device
) -> torch.Tensor:
    if order == "scattered":
        return torch.randint(0, shape.slots, (pairs, block), device=device)
    first = torch.randint(0, shape.slots, (pairs, 1), device=device)
    step = _RUNNING if order == "interleaved" else 1
    return (first + torch.arange(block, device=device) * step) % shape.slots


def time_kernel(
    call: Callable[..., torch.Tensor],
    shape: Shape,
    setting: tuple[str, bool, int, int],
    device: torch.device,
    runs: int,
    yardstick: Yardstick | None = None,
) -> tuple[list[float], float, float]:
    """Seconds of each run, and the best copy and read GB/s in between.

    ``setting``: order of the slots, keys corrected, pairs, block.
    """
    order, corrected, pairs, block = setting
    times, copies, reads = [], [0.0], [0.0]
    for run in range(runs + 1):
        dst, src = (random_slots(shape, pairs, block, order, device) for _ in range(2))
        shift = torch.randint(1 - _TABLE, _TABLE, (pairs, block), dtype=torch.int32, device=device)
        took = seconds(functools.partial(call, dst, src, shift if corrected else None), device)
        if run:  # the first one warms up
            times.append(took)
        if yardstick is not None:
            copies.append(yardstick.copy())
            reads.append(yardstick.read())
    return times, max(copies), max(reads)


def read_rates(shape: Shape, backends: Sequence[str], device: torch.device, runs: int) -> list[Row]:
    """Every backend over slots, corrected or not, block sizes and numbers of pairs."""
    layers, rotation = make_pool(shape, device), make_rotation(shape.head_dim)
    yardstick = Yardstick(device)
    rows = []
    for backend in backends:
        kernel = DistanceKernel(layers, rotation, backend=backend)
        slow = backend == "torch"
        numbers = [n for n in (1, 4, 16, 64, 256) if not slow or n <= _REFERENCE_PAIRS]
        for setting in itertools.product(ORDERS, (False, True), (8, 16), numbers):
            order, corrected, block, pairs = setting
            times, copy, read = time_kernel(
                kernel.squares,
                shape,
                (order, corrected, pairs, block),
                device,
                min(runs, 3) if slow else runs,
                yardstick,
            )
            size = 2 * pairs * block * shape.bytes_per_token / 1e9
            best, middle = min(times), statistics.median(times)
            rows.append(
                Row(
                    backend,
                    order,
                    corrected,
                    pairs,
                    block,
                    best * 1e3,
                    size / best,
                    size / middle,
                    copy,
                    read,
                )
            )
    return rows


def small_call_microseconds(device: torch.device, calls: int = 2_000) -> dict[str, float]:
    """Median wall time of a call on a small model's pool: what the scheduler's loop pays."""
    shape = Shape(layers=4, heads=2, head_dim=32, slots=4096)
    layers = make_pool(shape, device)
    kernel = DistanceKernel(layers, make_rotation(shape.head_dim))
    found = {}
    for name, corrected in (("as cached", False), ("corrected", True)):
        dst, src = (torch.randint(0, shape.slots, (1, 16), device=device) for _ in range(2))
        shift = torch.full((1, 16), 100, dtype=torch.int32, device=device) if corrected else None
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            kernel.squares(dst, src, shift)
            times.append(time.perf_counter() - start)
        found[name] = statistics.median(times) * 1e6
    return found


def cached_norms(device: torch.device) -> list[dict[str, float]]:
    """Relative error of the distance by norms and dot product, bf16 blocks ever closer.

    Source blocks are the destination's with some elements moved by one bf16 step;
    fp64 decides. By the C++ kernel (fp64 over tokens) and by fp32 sums of PyTorch.
    """
    near = Shape(layers=4, heads=8, head_dim=128, slots=64)
    layers = make_pool(near, device)
    found = []
    dst = torch.arange(0, 16, device=device)[None]
    for one_in in (1, 10, 100, 1_000, 10_000):
        for keys, values in layers:
            for side in (keys, values):
                bits = side[:16].view(torch.int16).clone()
                bits += (torch.rand(bits.shape, device=device) < 1 / one_in).to(torch.int16)
                side[16:32] = bits.view(torch.bfloat16)
        kernel = DistanceKernel(layers)
        src = dst + 16
        exact = torch.stack(
            [
                torch.stack(
                    [
                        (side[dst].double() - side[src].double()).square().sum((1, 2, 3))
                        for side in layer
                    ],
                    dim=-1,
                )
                for layer in layers
            ],
            dim=1,
        )
        true = block_distances(exact, 16, near.heads)
        norms = torch.stack([side[dst].double().norm() for layer in layers for side in layer])
        direct = block_distances(kernel.squares(dst, src), 16, near.heads)
        expanded = block_distances(_by_norms(kernel.moments(dst, src)), 16, near.heads)
        reference = DistanceKernel(layers, backend="torch").moments(dst, src)
        in_torch = block_distances(_by_norms(reference), 16, near.heads)
        found.append(
            dict(
                relative_distance=float(exact.sqrt().mean() / norms.mean()),
                difference=float(((direct - true) / true).abs()),
                norms=float(((expanded - true) / true).abs()),
                norms_torch=float(((in_torch - true) / true).abs()),
            )
        )
    return found


def moments_time_ratio(shape: Shape, device: torch.device, runs: int) -> float:
    """Time of all three sums over that of the difference, same pool, alternating."""
    kernel = DistanceKernel(make_pool(shape, device))
    setting = ("scattered", False, 64, 16)
    best = [float("inf"), float("inf")]
    for _ in range(runs):
        for index, call in enumerate((kernel.squares, kernel.moments)):
            times, _, _ = time_kernel(call, shape, setting, device, 1)
            best[index] = min(best[index], *times)
    return best[1] / best[0]


def print_rates(rows: Sequence[Row]) -> None:
    print(
        "\n| kernel | slots | keys | block | pairs | ms | GB/s (median) | copy | read | of copy | of read |"
    )
    print("|" + " --- |" * 11)
    for row in rows:
        print(
            f"| {row.backend} | {row.order} "
            f"| {'corrected' if row.corrected else 'as cached'} | {row.block} | {row.pairs} "
            f"| {row.best_ms:.3f} | {row.gb_per_s:.2f} ({row.median_gb_per_s:.2f}) "
            f"| {row.copy_gb_per_s:.1f} | {row.read_gb_per_s:.1f} "
            f"| {row.of_copy:.2f} | {row.of_read:.2f} |"
        )


def print_cached_norms(found: Sequence[dict[str, float]], ratio: float) -> None:
    print("\n| distance over norm | difference: rel. error | norms, C++ | norms, PyTorch |")
    print("| --- | --- | --- | --- |")
    for row in found:
        print("| " + " | ".join(f"{value:.1e}" for value in row.values()) + " |")
    print(f"\nthree sums take {ratio:.2f} times as long as the difference")


def summary(
    gigabytes: float = 2.0, layers: int = 32, runs: int = 8, reference: bool = True
) -> dict[str, Any]:
    """Measure and print everything; the figures by name."""
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    results["threads"] = torch.get_num_threads()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for name in devices:
        device = torch.device(name)
        one_slot = Shape(layers, heads=8, head_dim=128, slots=1)
        slots = int(gigabytes * 1e9) // one_slot.bytes_per_token
        shape = Shape(layers, heads=8, head_dim=128, slots=max(64, slots))
        kernel = "native" if name == "cpu" else "triton"
        backends = [kernel, *(["torch"] if reference and name == "cpu" else [])]
        print(f"\n{name}: {shape.layers} layers x {shape.heads} x {shape.head_dim} bf16, ", end="")
        print(f"{shape.slots} slots, {shape.slots * shape.bytes_per_token / 1e9:.1f} GB")
        rows = read_rates(shape, backends, device, runs)
        print_rates(rows)
        small = small_call_microseconds(device)
        print("\ncall of 1 pair x 16 tokens, 4 layers x 2 heads x 32: ", end="")
        print(", ".join(f"{value:.1f} us {key}" for key, value in small.items()))
        norms = cached_norms(device)
        ratio = moments_time_ratio(shape, device, runs)
        print_cached_norms(norms, ratio)
        prefix = f"distance_{name}"
        for order in ORDERS:
            many = [
                row
                for row in rows
                if (row.backend, row.order) == (kernel, order) and row.pairs >= 16
            ]
            results |= {
                f"{prefix}_{order}_gb_per_s": statistics.median(r.gb_per_s for r in many),
                f"{prefix}_{order}_of_copy": statistics.median(r.of_copy for r in many),
                f"{prefix}_{order}_of_read": statistics.median(r.of_read for r in many),
            }
            print(
                f"\n16 pairs or more, {order}: median {results[f'{prefix}_{order}_gb_per_s']:.1f} "
                f"GB/s, {results[f'{prefix}_{order}_of_copy']:.2f} of copy, "
                f"{results[f'{prefix}_{order}_of_read']:.2f} of read"
            )
        results |= {
            # Best of each setting, so of the same moments as the kernel's.
            f"{prefix}_copy_gb_per_s_median": statistics.median(row.copy_gb_per_s for row in rows),
            f"{prefix}_read_gb_per_s_median": statistics.median(row.read_gb_per_s for row in rows),
            f"{prefix}_rows": [asdict(row) for row in rows],
            f"{prefix}_small_call_us": small,
            f"{prefix}_cached_norms": norms,
            f"{prefix}_moments_time_ratio": ratio,
        }
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.bench.distance")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="Pool size (default 2).")
    parser.add_argument("--layers", type=int, default=32, help="Layers of the pool (default 32).")
    parser.add_argument("--runs", type=int, default=8, help="Runs per setting (default 8).")
    parser.add_argument("--no-reference", action="store_true", help="Leave PyTorch out.")
    parser.add_argument("--json", type=Path, help="Write all figures here.")
    options = parser.parse_args(argv)
    if options.gigabytes <= 0 or options.layers < 1 or options.runs < 1:
        parser.error("--gigabytes, --layers and --runs must be above 0")
    results = summary(options.gigabytes, options.layers, options.runs, not options.no_reference)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"\nwrote {options.json}")


if __name__ == "__main__":
    main()
