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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils import benchmark

from eval.bench.attention_rig import rotation
from eval.bench.bandwidth import Yardstick, seconds
from eval.bench.turns import take_turns
from sglang_reasoncache.kernels.distance import DistanceKernel

_TABLE = 32_768
#: Above this the reference's copies of a layer's blocks take long; it is left out.
_REFERENCE_PAIRS = 64
#: How the slots of a block lie in the pool: one of every 32 in a row, a token of each of
#: 32 running requests at a decode step; anywhere; or next to each other.
ORDERS = {"interleaved": 32, "scattered": None, "runs": 1}


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

    def kernel(self, device: torch.device, backend: str | None = None) -> DistanceKernel:
        """On a pool as SGLang lays it out: K and V of a layer are halves of one buffer."""
        torch.manual_seed(5)
        size = (2, self.slots, self.heads, self.head_dim)
        layers = [
            tuple(torch.empty(size, dtype=torch.bfloat16, device=device).uniform_(-1, 1))
            for _ in range(self.layers)
        ]
        return DistanceKernel(layers, rotation(_TABLE, self.head_dim), backend=backend)

    def random_slots(self, pairs: int, block: int, order: str) -> torch.Tensor:
        step = ORDERS[order]
        if step is None:
            return torch.randint(0, self.slots, (pairs, block))
        return (torch.randint(0, self.slots, (pairs, 1)) + torch.arange(block) * step) % self.slots


def read_rates(
    shape: Shape, backends: Sequence[str], device: torch.device, runs: int
) -> pd.DataFrame:
    """Every backend over slots, corrected or not, block sizes and numbers of pairs.

    Returns:
        A line a setting: the best run in ms and GB/s, the median run's GB/s, and the best of
        the yardstick meanwhile.
    """
    yardstick = Yardstick(device)
    lines = []
    for backend in backends:
        kernel, slow = shape.kernel(device, backend), backend == "torch"
        numbers = [n for n in (1, 4, 16, 64, 256) if not slow or n <= _REFERENCE_PAIRS]
        for setting in itertools.product(ORDERS, (False, True), (8, 16), numbers):
            order, corrected, block, pairs = setting
            run = functools.partial(_run, shape, kernel, device, setting)
            rounds = min(runs, 3) if slow else runs
            found = take_turns({"": run}, rounds, warm_up_rounds=1, between=yardstick.rates)
            gigabytes = 2 * pairs * block * shape.bytes_per_token / 1e9
            rate, copy, read = (
                gigabytes / found["s"].min(),
                found["copy"].max(),
                found["read"].max(),
            )
            lines.append(
                {"backend": backend, "order": order, "corrected": corrected}
                | {"pairs": pairs, "block": block, "best_ms": found["s"].min() * 1e3}
                | {"gb_per_s": rate, "median_gb_per_s": gigabytes / found["s"].median()}
                | {"copy_gb_per_s": copy, "read_gb_per_s": read}
                | {"of_copy": rate / copy, "of_read": rate / read}
            )
    return pd.DataFrame(lines)


def _run(
    shape: Shape, kernel: DistanceKernel, device: torch.device, setting: tuple[str, bool, int, int]
) -> list[dict[str, float]]:
    order, corrected, block, pairs = setting
    dst, src = (shape.random_slots(pairs, block, order).to(device) for _ in range(2))
    shift = torch.randint(1 - _TABLE, _TABLE, dst.shape, dtype=torch.int32).to(device)
    call = functools.partial(kernel.squares, dst, src, shift if corrected else None)
    return [{"s": seconds(call, device)}]


def print_rates(rates: pd.DataFrame, index: bool = False) -> None:
    print("\n" + rates.to_markdown(index=index, floatfmt=".2f"))


def small_call_microseconds(device: torch.device) -> dict[str, float]:
    """Median wall time of a call on a small model's pool: what the scheduler's loop pays."""
    shape = Shape(layers=4, heads=2, head_dim=32, slots=4096)
    squares = shape.kernel(device).squares
    slots = [shape.random_slots(1, 16, "scattered").to(device) for _ in range(2)]
    shift = torch.full((1, 16), 100, dtype=torch.int32, device=device)
    found = {}
    for name, third in (("as cached", None), ("corrected", shift)):
        names = {"squares": squares, "slots": slots, "shift": third}
        timer = benchmark.Timer(
            "squares(*slots, shift)", globals=names, num_threads=torch.get_num_threads()
        )
        found[name] = timer.blocked_autorange(min_run_time=0.1).median * 1e6
    return found


def summary(
    gigabytes: float = 2.0, layers: int = 32, runs: int = 8, reference: bool = True
) -> dict[str, Any]:
    """Measure and print everything; the figures by name."""
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    results["threads"] = torch.get_num_threads()
    for name in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        device, prefix = torch.device(name), f"distance_{name}"
        slot_bytes = Shape(layers, heads=8, head_dim=128, slots=1).bytes_per_token
        shape = Shape(layers, 8, 128, slots=max(64, int(gigabytes * 1e9) // slot_bytes))
        kernel = "native" if name == "cpu" else "triton"
        print(f"\n{name}: {layers} layers x 8 x 128 bf16, {shape.slots} slots")
        backends = [kernel, *(["torch"] if reference and name == "cpu" else [])]
        rates = read_rates(shape, backends, device, runs)
        print_rates(rates)
        small = small_call_microseconds(device)
        print("\ncall of 1 pair x 16 tokens, 4 layers x 2 heads x 32: ", end="")
        print(", ".join(f"{value:.1f} us {key}" for key, value in small.items()))
        many = rates[(rates["backend"] == kernel) & (rates["pairs"] >= 16)]
        medians = many.groupby("order")[["gb_per_s", "of_copy", "of_read"]].median()
        print("\n16 pairs or more, medians")
        print_rates(medians.loc[[*ORDERS]], index=True)
        for order, figure in itertools.product(ORDERS, medians.columns):
            results[f"{prefix}_{order}_{figure}"] = float(medians.loc[order, figure])
        # Best of each setting, so of the same moments as the kernel's.
        for figure in ("copy_gb_per_s", "read_gb_per_s"):
            results[f"{prefix}_{figure}_median"] = float(rates[figure].median())
        results[f"{prefix}_rows"] = rates.to_dict("records")
        results[f"{prefix}_small_call_us"] = small
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.bench.distance")
    add = parser.add_argument
    add("--gigabytes", type=float, default=2.0, help="Pool size (default 2).")
    add("--layers", type=int, default=32, help="Layers of the pool (default 32).")
    add("--runs", type=int, default=8, help="Runs per setting (default 8).")
    add("--no-reference", action="store_true", help="Leave PyTorch out.")
    add("--json", type=Path, help="Write all figures here.")
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
