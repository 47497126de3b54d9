# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.plan``: how the time of a plan grows with the positions of a request.

Half of them are shared, in runs of 8 tokens: every tile has many rotations. By C++, and by Triton:
where there is no GPU in Triton's interpreter, which takes the programs' steps one by one."""

import functools
import os
import statistics
from collections.abc import Callable

import torch

from eval.bench.attention_batch import Shape, cached_positions, lay_rows
from eval.bench.turns import seconds
from sglang_reasoncache.kernels.plan import plan_rows

GPU = torch.cuda.is_available()
POSITIONS = 1000, 4000, 16_000, 64_000, 128_000
_PERCENT, _RUN = 50, 8


def planners(positions: int) -> dict[str, Callable[[], object]]:
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into

    shape = Shape(1, positions)
    rows, cached_at = lay_rows(shape, _PERCENT, _RUN), cached_positions(shape)
    where = rows, torch.zeros(1, dtype=torch.int64), torch.tensor([positions]), cached_at
    there = [side.cuda() for side in where] if GPU else where
    buffers = PlanBuffers.of(1, positions, there[0].device, merge=True)
    return {
        "C++": functools.partial(plan_rows, *where, num_slots=shape.slots, merge=True),
        "Triton": functools.partial(plan_into, buffers, *there, num_slots=shape.slots),
    }


def main() -> None:
    if not GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    rounds, machine = {"C++": 21, "Triton": 21 if GPU else 3}, torch.get_num_threads()
    print(f"C++ on {machine} threads; Triton " + ("on a GPU" if GPU else "interpreted"))
    print("| positions | " + " | ".join(f"{name}, ms | ns a position" for name in rounds) + " |")
    print("| --- " * (1 + 2 * len(rounds)) + "|")
    for positions in POSITIONS:
        cells = []
        for name, plan in planners(positions).items():
            device = torch.device("cuda" if GPU and name == "Triton" else "cpu")
            plan()
            ms = 1e3 * statistics.median(seconds(plan, device) for _ in range(rounds[name]))
            cells += [f"{ms:.3g}", f"{1e6 * ms / positions:,.3g}"]
        print(f"| {positions:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
