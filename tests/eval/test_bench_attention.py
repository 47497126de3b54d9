# SPDX-License-Identifier: Apache-2.0
"""The attention benchmark's batches, curves and figures; what it times is checked where it runs."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

from eval.bench import attention, attention_cpu, attention_cuda, attention_cuda_rows
from eval.bench.attention_growth import Point, Setting, curve_of, curves, draw, load, settings
from eval.bench.attention_rows import BLOCK, Shape, cached_positions, lay_rows, shared_blocks
from eval.bench.quartiles import Quartiles
from sglang_reasoncache.kernels.plan import plan_rows
from tests.triton_runs import interpreted

SHAPE = Shape(3, 989, 4, 2, 64)


@pytest.mark.parametrize("percent", [0, 22, 75, 90])
def test_shared_blocks_lie_at_earlier_blocks_of_the_row(percent: int) -> None:
    pairs = shared_blocks(989, percent / 100, random.Random(1))
    shared = {block for block, _ in pairs}
    assert len(shared) == len(pairs) == min(round(percent / 100 * 989 / BLOCK), 60)
    last = (989 - 1) // BLOCK
    for block, source in pairs:
        assert 0 <= source < block < last
        assert source not in shared


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 48])
def test_short_rows_share_what_they_can(tokens: int) -> None:
    pairs = shared_blocks(tokens, 0.9, random.Random(1))
    assert all(0 <= source < block < (tokens - 1) // BLOCK for block, source in pairs)


@pytest.mark.parametrize("percent", [0, 22, 50])
def test_rows_are_shared_by_so_much_and_shifted_by_whole_blocks(percent: int) -> None:
    rows, cached_at = lay_rows(SHAPE, percent), cached_positions(SHAPE)
    assert rows.dtype == cached_at.dtype == torch.int32
    assert cached_at.shape == (SHAPE.slots,)
    plan = plan_rows(
        rows,
        torch.arange(SHAPE.requests),
        torch.full((SHAPE.requests,), SHAPE.tokens),
        cached_at,
        num_slots=SHAPE.slots,
        backend="torch",
    )
    shift = torch.zeros(rows.numel()) if plan.shift is None else plan.shift
    shifted = float((shift != 0).float().mean())
    assert shifted == pytest.approx(percent / 100, abs=BLOCK / SHAPE.tokens)
    # Used later than computed, at the slot that the same request wrote for it.
    assert bool((shift >= 0).all()) and bool((shift % BLOCK == 0).all())
    assert torch.equal((rows - 1) % SHAPE.requests, torch.arange(3)[:, None].expand(3, 989).int())
    unshared = lay_rows(SHAPE, 0)
    assert len(unshared.unique()) == unshared.numel() == SHAPE.slots - 1
    assert torch.equal(rows[:, :BLOCK], unshared[:, :BLOCK])
    assert torch.equal(rows[:, -1], unshared[:, -1])


def test_bytes_count_each_key_and_value_once() -> None:
    assert SHAPE.layer_bytes == 3 * 989 * 2 * 2 * 64 * 2


def made(setting: Setting, ms: float) -> Point:
    spread = Quartiles(ms, ms * 0.9, ms * 1.2)
    name = curve_of(setting)
    return Point(setting, {name: spread, **({"torch-native": spread} if name == "ours" else {})}, 1)


POINTS = [
    made(setting, 1.0 + index)
    for index, setting in enumerate(
        settings(
            [Shape(8, tokens, 32, 8, 128) for tokens in (4000, 250)],
            [Shape(requests, 1000, 32, 8, 128) for requests in (1, 64)],
            (Shape(32, 1000, 32, 8, 128), (0, 50)),
        )
    )
]


def test_curves_run_by_rising_value() -> None:
    tokens = curves(POINTS, "tokens")
    assert list(tokens) == ["ours", "torch-native", "ours, 22% shared"]
    assert [value for value, _ in tokens["ours"]] == [250, 4000]
    assert [ms.median for _, ms in tokens["ours, 22% shared"]] == [4.0, 2.0]
    assert [value for value, _ in curves(POINTS, "requests")["torch-native"]] == [1, 64]
    assert [value for value, _ in curves(POINTS, "shared_percent")["ours"]] == [0, 50]


def test_points_survive_json() -> None:
    text = json.dumps([dataclasses.asdict(point) for point in POINTS])
    assert load(json.loads(text)) == POINTS


def test_the_picture_has_a_row_for_each_device(tmp_path: Path) -> None:
    draw({"CPU": POINTS}, tmp_path / "one.png")
    draw({"CPU": POINTS, "A GPU with $ in its name": POINTS}, tmp_path / "two.png")
    one, two = (imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert two.shape[0] == 2 * one.shape[0] and one.shape[1] == two.shape[1]
    assert float(one[..., :3].std()) > 0.01


def cuda_row(percent: int, ours: float) -> attention_cuda_rows.Row:
    def ms(value: float) -> Quartiles:
        return Quartiles(value, value, value)

    return attention_cuda_rows.Row(
        shape=str(attention_cuda_rows.SHAPE),
        shared_percent=percent,
        ours=ms(ours),
        # No server reads in this order: it must not get into the figures.
        flashinfer=ms(1.2),
        flashinfer_as_cached=ms(1.1) if percent else None,
        plan=ms(0.32),
        gather=ms(3.0),
        copy_gb_per_s=ms(4000.0),
        decode_gb_per_s=3500.0,
        gather_gb_per_s=3000.0,
    )


def test_key_figures_of_a_gpu() -> None:
    found = attention_cuda_rows.key_figures(
        [cuda_row(0, 1.25), cuda_row(22, 1.0), cuda_row(50, 0.8)]
    )
    assert found["decode_vs_flashinfer"] == pytest.approx(1.2 / 1.25)
    assert found["decode_shared22_vs_flashinfer"] == pytest.approx(1.0 / 1.2)
    assert found["decode_fraction_of_copy"] == pytest.approx(0.875)
    assert found["plan_fraction_of_step"] == pytest.approx(0.32 / (0.32 + 32))


def test_key_figures_of_the_cpu_are_those_of_the_worse_heads() -> None:
    def row(shape: str, speedup: float, rate: float) -> attention_cpu.Row:
        one = Quartiles(1.0, 1.0, 1.0)
        return attention_cpu.Row(
            shape=shape,
            layers=8,
            shared_percent=0,
            plan_us=one,
            decode_ms=one,
            native_ms=one,
            native_threads=1,
            speedup=dataclasses.replace(one, median=speedup),
            gb_per_s=rate,
            read_gb_per_s=dataclasses.replace(one, median=20.0),
        )

    rows = [row("32x1000-4/2x64", 9.0, 10.0), row("32x1000-32/8x128", 3.0, 14.0)]
    rows.append(row("8x16000-32/8x128", 1.0, 1.0))
    assert attention_cpu.key_figures(rows) == {
        "decode_speedup_vs_torch_native": 3.0,
        "decode_fraction_of_bandwidth": 0.5,
    }
    assert attention_cpu.key_figures(rows[2:]) == {}


def test_results_are_written_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / "made" / "kernels.json"
    results = attention.Results(path, rounds=3)
    results.add("cpu", {"device": "CPU, 2 threads"})
    results.add("cpu", {"growth": [dataclasses.asdict(point) for point in POINTS]})
    results.add("cuda", {"device": "GPU", "decode_vs_flashinfer": 1.0})
    found = json.loads(path.read_text())
    assert found["rounds"] == 3 and found["cuda"]["decode_vs_flashinfer"] == 1.0
    assert load(found["cpu"]["growth"]) == POINTS
    assert path.with_suffix(".png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--shapes=7x7", "--shapes: unknown 7x7"),
        ("--shared=91", "--shared must be between 0 and 90"),
        ("--shared=a", "--shared must be whole numbers"),
        ("--growth-rounds=0", "--growth-rounds must be at least 1"),
        ("--threads=0", "--threads must be at least 1"),
        ("--devices=tpu", "--devices: cpu, cuda, got tpu"),
    ],
)
def test_bad_options_are_named(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        attention.parse([argument])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.parse([]).devices == ["cpu"]
    with pytest.raises(SystemExit):
        attention.parse(["--devices=cuda"])
    assert "sees no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        attention_cuda.main([])
    assert "no CUDA device is visible" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_small_batch_on_a_gpu() -> None:
    from eval.bench.attention_cuda_rig import GpuStep
    from eval.bench.bandwidth import Yardstick

    step = GpuStep(Shape(4, 500, 32, 8, 128))
    for percent in (0, 22):
        row = attention_cuda.measure(step, percent, 1, Yardstick(torch.device("cuda"), 0.1))
        assert 0 < row.ours.low <= row.ours.median and row.flashinfer.median > 0


GPU_STEP = """
import torch
from eval.bench.attention_cuda_rig import GpuStep
from eval.bench.attention_rows import Shape

with torch.inference_mode():
    step = GpuStep(Shape(3, 70, 8, 2, 32), "cpu")
    for percent in (0, 22):
        step.share(percent)
        step.check()
    step.decode().fill_(1)
    try:
        step._compare("ones", step._out, step._plan)
    except RuntimeError as error:
        print(error)
"""


def test_the_gpu_batch_interpreted() -> None:
    """Plans, decode and gather of what is timed on a GPU, and that a wrong result is seen."""
    done = interpreted("-c", GPU_STEP, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.fullmatch(r"ones, 3x70-8/2x32: relative error [\d.]+\n", done.stdout)
