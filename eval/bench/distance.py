# SPDX-License-Identifier: Apache-2.0
"""How fast the KV distance reads the pool: a pool far above the caches, other slots in every run."""

import functools

import torch

from eval.bench.attention_batch import rotation
from eval.bench.turns import Yardstick, seconds, take_turns
from sglang_reasoncache.kernels.distance import DistanceKernel

_TABLE = 32_768
_LAYERS, _HEADS, _DIM = 32, 8, 128
_SLOT_BYTES = _LAYERS * 2 * _HEADS * _DIM * 2
_PAIRS, _BLOCK, _ROUNDS = 256, 16, 8
#: Slots of a block are one of every 32: a token of each of 32 running requests at a decode step.
_APART = 32


def of_copy(device: str, slots: int = 16_384) -> float:
    """The best rate at which 256 pairs of 16 tokens are read, K and V of both once, over the best copy
    bandwidth meanwhile: the worse of as cached and corrected."""
    torch.manual_seed(5)
    at, size = torch.device(device), (2, slots, _HEADS, _DIM)
    # K and V of a layer are halves of one buffer, as SGLang lays them out.
    empty = functools.partial(torch.empty, size, dtype=torch.bfloat16, device=at)
    pool = [tuple(empty().uniform_(-1, 1)) for _ in range(_LAYERS)]
    backend = {"cpu": "native", "cuda": "triton"}[device]
    kernel = DistanceKernel(pool, rotation(_TABLE, _DIM), backend=backend)

    def run(corrected: bool) -> list[dict[str, float]]:
        apart = torch.arange(_BLOCK) * _APART
        dst, src = ((torch.randint(slots, (_PAIRS, 1)) + apart).to(at) % slots for _ in range(2))
        shift = torch.randint(1 - _TABLE, _TABLE, dst.shape, dtype=torch.int32).to(at)
        call = functools.partial(kernel.squares, dst, src, shift if corrected else None)
        return [{"s": seconds(call, at)}]

    sides = {name: functools.partial(run, name == "corrected") for name in ("cached", "corrected")}
    samples = take_turns(sides, _ROUNDS, Yardstick(at).rates)
    slowest = samples.groupby("side")["s"].min().max()
    return float(2 * _PAIRS * _BLOCK * _SLOT_BYTES / 1e9 / slowest / samples["copy"].max())
