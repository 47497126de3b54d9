# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.distance``: how fast the KV distance reads the pool, on each device.

A pool far above the caches, other slots in every run. Bytes are K and V that a call reads, once."""

import functools
import itertools
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eval import command
from eval.bench.attention_batch import rotation
from eval.bench.turns import Yardstick, seconds, take_turns
from eval.command import option
from eval.runs.folder import write_whole
from sglang_reasoncache.kernels.distance import DistanceKernel

_TABLE = 32_768
_LAYERS, _HEADS, _DIM = 32, 8, 128
_SLOT_BYTES = _LAYERS * 2 * _HEADS * _DIM * 2
#: How the slots of a block lie in the pool: one of every 32 in a row, a token of each of
#: 32 running requests at a decode step; anywhere; or next to each other.
_ORDERS = {"interleaved": 32, "scattered": None, "runs": 1}
#: Calls that are timed: order, whether keys are corrected, tokens of a block, pairs.
_CALLS = [*itertools.product(_ORDERS, (False, True), (8, 16), (1, 4, 16, 64, 256))]


def make_kernel(device: str, layers: int, slots: int, heads: int, head_dim: int) -> DistanceKernel:
    """On a pool in bf16 as SGLang lays it out: K and V of a layer are halves of one buffer."""
    torch.manual_seed(5)
    empty: dict[str, Any] = dict(
        size=(2, slots, heads, head_dim), dtype=torch.bfloat16, device=device
    )
    pool = [tuple(torch.empty(**empty).uniform_(-1, 1)) for _ in range(layers)]
    backend = {"cpu": "native", "cuda": "triton"}[device]
    return DistanceKernel(pool, rotation(_TABLE, head_dim), backend=backend)


def random_slots(slots: int, pairs: int, block: int, order: str) -> torch.Tensor:
    """``[pairs, block]``."""
    step = _ORDERS[order]
    if step is None:
        return torch.randint(0, slots, (pairs, block))
    return (torch.randint(0, slots, (pairs, 1)) + torch.arange(block) * step) % slots


def read_rates(device: str, slots: int) -> pd.DataFrame:
    """A line a call, the best and the median of 8 runs, beside the best bandwidth meanwhile."""
    at, kernel = torch.device(device), make_kernel(device, _LAYERS, slots, _HEADS, _DIM)
    yardstick = Yardstick(at)

    def run(order: str, corrected: bool, block: int, pairs: int) -> list[dict[str, float]]:
        dst, src = (random_slots(slots, pairs, block, order).to(at) for _ in range(2))
        shift = torch.randint(1 - _TABLE, _TABLE, dst.shape, dtype=torch.int32).to(at)
        call = functools.partial(kernel.squares, dst, src, shift if corrected else None)
        return [{"s": seconds(call, at)}]

    lines = []
    for order, corrected, block, pairs in _CALLS:
        side = functools.partial(run, order, corrected, block, pairs)
        found = take_turns({"": side}, 8, yardstick.rates)
        rates = 2 * pairs * block * _SLOT_BYTES / 1e9 / found["s"]
        line = {"backend": kernel.backend, "order": order, "corrected": corrected}
        line |= {"pairs": pairs, "block": block, "best_ms": found["s"].min() * 1e3}
        line |= {"gb_per_s": rates.max(), "median_gb_per_s": rates.median()}
        line |= {f"of_{name}": rates.max() / found[name].max() for name in ("copy", "read")}
        lines.append(line)
    return pd.DataFrame(lines)


def of_copy() -> float:
    """On a GPU, 256 pairs of 16 interleaved tokens, over copy bandwidth: the worse of as cached
    and corrected."""
    many = "order == 'interleaved' and pairs == 256 and block == 16"
    return float(read_rates("cuda", 32_768).query(many)["of_copy"].min())


def small_call_microseconds(device: str) -> dict[str, float]:
    """Median wall time of a call on a small model's pool: what the scheduler's loop pays."""
    squares = make_kernel(device, layers=4, slots=4096, heads=2, head_dim=32).squares
    dst, src = (random_slots(4096, 1, 16, "scattered").to(device) for _ in range(2))
    shift = torch.full((1, 16), 100, dtype=torch.int32, device=device)
    found = {}
    for name, third in (("as cached", None), ("corrected", shift)):
        call = functools.partial(squares, dst, src, third)
        times = [seconds(call, torch.device(device)) for _ in range(1000)]
        found[name] = statistics.median(times) * 1e6
    return found


def summary(gigabytes: float = 2.0) -> dict[str, Any]:
    """Measure and print everything on a pool of this size; the figures by name."""
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    slots = max(64, int(gigabytes * 1e9) // _SLOT_BYTES)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        rates, small = read_rates(device, slots), small_call_microseconds(device)
        table = rates.to_markdown(index=False, floatfmt=".2f")
        print(f"\n{device}: {_LAYERS} layers x {_HEADS} x {_DIM} bf16, {slots} slots\n\n{table}")
        print(f"\ncall of 1 pair x 16 tokens, 4 layers x 2 heads x 32, us: {small}")
        results[f"distance_{device}_rows"] = rates.to_dict("records")
        results[f"distance_{device}_small_call_us"] = small
    return results


@dataclass(frozen=True)
class Options:
    gigabytes: float = option(2.0, "pool size")
    json: Path | None = option(None, "file of all figures")


def work(options: Options) -> None:
    results = summary(options.gigabytes)
    if options.json is not None:
        write_whole(options.json, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    command.run(Options, work)
