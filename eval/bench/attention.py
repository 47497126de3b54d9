# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention`` times our decode attention and SGLang's (CPU) or FlashInfer's (GPU).

The compared kernels run in turns on the same KV pool. The memory bandwidth is measured for comparison. Writes
``build/bench/kernels.json``, which has one part for the CPU and one for the GPU."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from eval import command
from eval.bench.attention_batch import SHARES, Shape
from eval.bench.turns import Yardstick, as_text, spread, take_turns
from eval.command import commas, option
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import write_json
from sglang_reasoncache.cpu.activate import PLATFORM_NAME

#: The figures of one shape and setting. Each time is a result (median, quartiles) of :func:`spread`.
Row = dict[str, Any]

_HEADS = ((4, 2, 64), (32, 8, 128), (128, 1, 512, 64))
#: Shapes measured on the CPU. A name begins with REQUESTSxTOKENS: 32x1000 is 32 requests of 1,000 tokens.
SHAPES = tuple(Shape(*size, *heads) for size in ((32, 1000), (8, 16_000)) for heads in _HEADS)


def on_cpu(shapes: Sequence[Shape], rounds: int) -> Iterator[Row]:
    """Yields a row for each shape and setting of :data:`SHARES`."""
    # Our backend needs our platform, which must be set before SGLang is imported.
    os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
    from eval.bench.attention_cpu import CpuBatch, outside_a_server

    yardstick = Yardstick(torch.device("cpu"))
    with outside_a_server():
        for shape in shapes:
            batch = CpuBatch(shape)
            for percent, run in SHARES:
                batch.share(percent, run)
                samples = take_turns(batch.sides(), rounds, yardstick.rates)
                row: Row = {"shape": str(shape), "shared_percent": percent, "run": run}
                yield {**row, **batch.row(samples), "read_gb_per_s": spread(samples["read"])}
            del batch


def on_gpu(rounds: int) -> Iterator[Row]:
    """Yields a row for each setting of :data:`SHARES`, all of one shape."""
    from eval.bench.attention_cuda import CudaBatch, measured

    batch = CudaBatch(Shape(64, 16_000))
    rates = Yardstick(batch.device).rates()
    for row in measured(batch, rates["copy"], rounds):
        times = {f"{name}_ms": quartiles for name, quartiles in row.pop("ms").items()}
        yield {"shape": str(batch.shape), **row, **times, "copy_gb_per_s": rates["copy"]}


def _shape(name: str) -> Shape:
    match = re.fullmatch(r"(\d+)x(\d+)-(\d+)/(\d+)x(\d+)(?:\+(\d+))?", name)
    sizes = [int(size) for size in match.groups() if size] if match else [0]
    if not all(sizes) or sizes[2] % sizes[3]:
        expected = "REQUESTSxTOKENS-HEADS/KV_HEADSxDIM[+ROTATED]"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {name!r}")
    return Shape(*sizes)


@dataclass(frozen=True)
class Options:
    shapes: tuple[Shape, ...] = option(
        SHAPES,
        "shapes to measure on a CPU, REQUESTSxTOKENS-HEADS/KV_HEADSxDIM[+ROTATED]",
        read=commas(_shape),
    )
    rounds: int = option(7, "times that each setting is measured", least=1)
    device: str = option(
        "cuda" if torch.cuda.is_available() else "cpu", "cpu or cuda", choices=("cpu", "cuda")
    )
    output: Path = option(
        Path("build/bench/kernels.json"), "JSON file of the figures; those of the other device stay"
    )


def work(options: Options) -> None:
    torch.manual_seed(5)
    is_cpu = options.device == "cpu"
    rows = []
    with torch.inference_mode():
        for row in on_cpu(options.shapes, options.rounds) if is_cpu else on_gpu(options.rounds):
            print("{shape}, {shared_percent}%".format(**row), file=sys.stderr, flush=True)
            rows.append(row)
    table = pd.DataFrame([{name: as_text(value) for name, value in row.items()} for row in rows])
    print("\n" + table.to_markdown(index=False, disable_numparse=True), flush=True)
    threads = f"CPU, {torch.get_num_threads()} threads"
    about: dict[str, Any] = {"machine": describe_machine(), "versions": describe_versions()}
    about["device"] = threads if is_cpu else torch.cuda.get_device_name()
    # Results of the other device stay in the file.
    results = json.loads(options.output.read_text()) if options.output.is_file() else {}
    results[options.device] = {**about, "rounds": options.rounds, "rows": rows}
    write_json(options.output, results)
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    command.run(Options, work)
