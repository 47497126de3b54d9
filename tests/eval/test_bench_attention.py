# SPDX-License-Identifier: Apache-2.0
"""The attention benchmark's batches and figures; what it times is checked where it runs."""

import json
import re
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

from eval import command
from eval.bench import attention
from eval.bench.attention import measure
from eval.bench.attention_batch import (
    RUN,
    SHARES,
    Shape,
    cached_positions,
    lay_rows,
    shared_blocks,
)
from eval.bench.attention_cpu import CpuBatch
from eval.bench.turns import as_text, spread, take_turns
from sglang_reasoncache.kernels.plan import plan_rows
from tests.triton_runs import interpreted

SHAPE = Shape(3, 989, 4, 2, 64)


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 48, 989])
@pytest.mark.parametrize("percent", [0, 22, 75, 90])
def test_shared_blocks_lie_at_earlier_blocks_of_the_row(tokens: int, percent: int) -> None:
    blocks, sources = shared_blocks(tokens, percent / 100, torch.Generator().manual_seed(1))
    last = (tokens - 1) // RUN
    wanted = min(round(percent / 100 * tokens / RUN), max(0, last - 1))
    assert len(blocks.unique()) == len(blocks) == wanted
    assert all(sources >= 0) and all(sources < blocks) and all(blocks < last)
    assert not {*sources.tolist()} & {*blocks.tolist()}


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
    # Used later than computed, at the slot that the same request wrote for it.
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


def test_text_of_figures() -> None:
    figure = spread(pd.Series([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert figure == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert as_text(figure) == "3 (2 to 4)"
    assert [as_text(one) for one in (None, "x", 1.23456)] == ["", "x", "1.235"]


def flat(value: float) -> dict[str, float]:
    return {"median": value, "low": value * 0.9, "high": value * 1.2}


def test_figures_of_a_gpu() -> None:
    cuda = pytest.importorskip("eval.bench.attention_cuda")
    batch = object.__new__(cuda.CudaBatch)
    batch.shape = Shape(64, 16_000)
    size, rows = batch.shape.layer_bytes / 1e6, []
    for percent, run, ours in ((0, 48, 1.25), (22, 48, 1.0), (22, 16, 1.1), (50, 48, 0.8)):
        times = {"ours": ours, "flashinfer": 1.2, "plan": 0.32, "gather": 3.0}
        samples = [{"side": name, "ms": ms, "bandwidth": 4000.0} for name, ms in times.items()]
        row = {"shared_percent": percent, "run": run, "copy_gb_per_s": flat(4000.0)}
        rows.append(row | batch.row(pd.DataFrame(samples)))
    assert batch.key_figures(rows) == {
        "decode_vs_flashinfer": pytest.approx(1.2 / 1.25),
        "decode_shared22_vs_flashinfer": pytest.approx(1.0 / 1.2),
        "decode_shared22_runs16_vs_flashinfer": pytest.approx(1.1 / 1.2),
        "decode_shared50_vs_flashinfer": pytest.approx(0.8 / 1.2),
        "decode_fraction_of_copy": pytest.approx(size / 1.25 / 4000),
        "gather_fraction_of_copy": pytest.approx(2 * size / 3 / 4000),
        "plan_fraction_of_step": pytest.approx(0.32 / (0.32 + 32)),
    }
    assert rows[0]["plan_us"] == pytest.approx(320)


def test_key_figures_of_the_cpu_are_those_of_the_worse_heads() -> None:
    shapes = (("32x1000-4/2x64", 9.0, 0.5), ("32x1000-32/8x128", 3.0, 0.7), ("8x16000-", 1.0, 0.1))
    rows = [
        {"shape": shape, "shared_percent": 0, "speedup": flat(speedup), "of_read": of_read}
        for shape, speedup, of_read in shapes
    ]
    rows += [
        {"shape": shape, "shared_percent": percent, "run": run, "of_unshared": flat(percent * by)}
        for shape, by in (("32x1000-a", 1.0), ("32x1000-b", 2.0), ("8x16000-", 3.0))
        for percent, run in ((22, 48), (22, 16), (50, 48))
    ]
    latent = "8x16000-128/1x512+64", "32x1000-128/1x512+64"
    rows += [
        {"shape": shape, "shared_percent": 0, "speedup": flat(by), "of_products": flat(by / 2)}
        for shape, by in zip(latent, (9.0, 8.0), strict=True)
    ]
    rows += [
        {"shape": shape, "shared_percent": 50, "run": 48, "of_unshared": flat(by)}
        for shape, by in zip(latent, (0.5, 0.4), strict=True)
    ]
    assert CpuBatch.key_figures(rows) == {
        "decode_speedup_vs_torch_native": 3.0,
        "decode_fraction_of_bandwidth": 0.5,
        "decode_shared22_vs_unshared": 44.0,
        "decode_shared22_runs16_vs_unshared": 44.0,
        "decode_shared50_vs_unshared": 100.0,
        "mla_vs_torch": 8.0,
        "mla_vs_torch_products": 4.0,
        "mla_shared50_vs_unshared": 0.5,
    }
    assert CpuBatch.key_figures(rows[2:3]) == {}


def test_results_are_written_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    attention.record(path, "cpu", {"device": "CPU, 2 threads"})
    attention.record(path, "cpu", {"rows": [1]})
    found = {"cpu": {"device": "CPU, 2 threads", "rows": [1]}}
    assert json.loads(path.read_text()) == found


def test_bad_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, message in {
        "--shapes=7x7": "--shapes: expected REQUESTSxTOKENS-HEADS/KV_HEADSxDIM[+ROTATED], got '7x7'",
        "--shapes=1x9-3/2x8": "HEADS/KV_HEADSxDIM[+ROTATED], got '1x9-3/2x8'",
        "--rounds=0": "--rounds: must be at least 1, got 0",
        "--server-rounds=0": "--server-rounds: must be at least 1, got 0",
    }.items():
        with pytest.raises(SystemExit):
            command.parse(attention.Options, [argument])
        assert message in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_batch_on_a_gpu() -> None:
    from eval.bench.attention_cuda import CudaBatch

    for row in measure(CudaBatch, [Shape(4, 500)], rounds=1):
        assert 0 < row["ours"]["low"] <= row["ours"]["median"] and row["flashinfer"]["median"] > 0


GPU_BATCH = """
import json, sys

for name in ("sglang", "flashinfer", "pandas", "transformers", "scipy", "matplotlib"):
    sys.modules[name] = None
import torch
from eval.bench.attention_batch import Shape
from eval.bench.attention_cuda import CudaBatch, measured_alone

def once(call):
    call()
    return [{"ms": 1.0}]

with torch.inference_mode():
    batch = CudaBatch(Shape(1, 70, 4, 1, 16), "cpu")
    for figures in measured_alone(batch, 10.0, once):
        print(json.dumps(figures))
    batch = CudaBatch(Shape(2, 70, 2, 2, 16), "cpu", torch.float8_e4m3fn)
    batch.share(22, 16)
    try:
        batch.check("ones", torch.ones_like(batch.query), batch.rows)
    except RuntimeError as error:
        print(error)
"""


def test_the_gpu_batch_interpreted() -> None:
    """Plans, decode and gather of what is timed on a GPU, with PyTorch and Triton alone, and that a
    wrong result is seen."""
    done = interpreted("-c", GPU_BATCH, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["shared_percent"], row["run"]) for row in rows] == [*SHARES]
    assert {*rows[0]["ms"]} == {"ours", "plan", "gather"}
    assert re.fullmatch(r"ones, 2x70-2/2x16: relative error [\d.]+", last)
