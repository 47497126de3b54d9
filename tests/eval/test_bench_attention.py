# SPDX-License-Identifier: Apache-2.0
"""The attention benchmark's batches and figures; the benchmark itself checks the kernels that it times."""

import json
import re
from functools import partial

import pytest
import torch

from eval.bench.attention_batch import RUN, SHARES, Shape, cached_positions, lay_rows
from eval.bench.turns import take_turns
from sglang_reasoncache.kernels.plan import plan_rows
from tests.triton_runs import interpreted

SHAPE = Shape(3, 989, 4, 2, 64)


@pytest.mark.parametrize("percent", [0, 22, 50])
def test_rows_are_shared_by_so_much_and_shifted_by_whole_blocks(percent: int) -> None:
    rows, cached_at = lay_rows(SHAPE, percent), cached_positions(SHAPE)
    assert rows.dtype == cached_at.dtype == torch.int32
    assert cached_at.shape == (SHAPE.slots,) and SHAPE.layer_bytes == 3 * 989 * 2 * 2 * 64 * 2
    requests, lengths = torch.arange(3), torch.full((3,), SHAPE.tokens)
    plan = plan_rows(rows, requests, lengths, cached_at, num_slots=SHAPE.slots)
    shift = torch.zeros(rows.numel()) if plan.shift is None else plan.shift
    shifted = float((shift != 0).float().mean())
    assert shifted == pytest.approx(percent / 100, abs=RUN / SHAPE.tokens)
    # Shifted entries are used at later positions than computed, in slots their request wrote.
    assert bool((shift >= 0).all()) and bool((shift % RUN == 0).all())
    assert torch.equal((rows - 1) % SHAPE.requests, torch.arange(3)[:, None].expand(3, 989).int())
    unshared = lay_rows(SHAPE, 0)
    assert len(unshared.unique()) == unshared.numel() == SHAPE.slots - 1
    assert torch.equal(rows[:, :RUN], unshared[:, :RUN])
    assert torch.equal(rows[:, -1], unshared[:, -1])


def test_sides_take_turns_and_the_first_round_warms_up() -> None:
    order: list[str] = []

    def side(name: str) -> list[dict[str, float]]:
        order.append(name)
        return [{"ms": 2.0}]

    sides = {name: partial(side, name) for name in ("a", "b")}
    samples = take_turns(sides, 2, lambda: {"bandwidth": 7.0})
    assert "".join(order) == "abbaab"
    assert samples["round"].tolist() == [1, 1, 2, 2] and set(samples["bandwidth"]) == {7.0}


GPU_BATCH = """
import json, sys

for name in ("sglang", "flashinfer", "pandas", "transformers", "scipy", "matplotlib"):
    sys.modules[name] = None
import torch
from eval.bench.attention_batch import Shape
from eval.bench.attention_cuda import CudaBatch, measured

def once(call):
    call()
    return [1.0]

with torch.inference_mode():
    batch = CudaBatch(Shape(1, 70, 4, 1, 16), "cpu")
    for figures in measured(batch, 10.0, 1, once):
        print(json.dumps(figures))
    batch = CudaBatch(Shape(2, 70, 2, 2, 16), "cpu", torch.float8_e4m3fn)
    batch.share(22, 16)
    try:
        batch.check("ones", torch.ones_like(batch.query), batch.rows)
    except RuntimeError as error:
        print(error)
"""


def test_the_gpu_batch_interpreted() -> None:
    """The GPU benchmark's plans and decode run with PyTorch and Triton alone, and its check finds a
    wrong result."""
    done = interpreted("-c", GPU_BATCH, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["shared_percent"], row["run"]) for row in rows] == [*SHARES]
    assert {*rows[0]["ms"]} == {"ours", "plan"}
    assert re.fullmatch(r"ones, 2x70-2/2x16: relative error [\d.]+", last)
