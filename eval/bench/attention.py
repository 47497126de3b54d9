# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention``: decode attention, ours against SGLang's and FlashInfer's.

On one pool, in turn, beside the memory bandwidth. Writes ``build/bench/kernels.json``, a part for each
device."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from eval import command
from eval.bench.attention_batch import SHARES, Shape
from eval.bench.turns import Yardstick, as_text, spread, take_turns
from eval.command import commas, option
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import write_json
from sglang_reasoncache.platform import PLATFORM_NAME

if TYPE_CHECKING:
    from eval.bench.attention_cpu import CpuBatch
    from eval.bench.attention_cuda import CudaBatch

#: What one setting's samples come to: JSON, times as :func:`eval.bench.turns.spread`.
Row = dict[str, Any]

_HEADS = ((4, 2, 64), (32, 8, 128), (128, 1, 512, 64))
#: Results are named after 32x1000 and 64x16000.
SHAPES = {
    "cpu": tuple(Shape(*size, *heads) for size in ((32, 1000), (8, 16_000)) for heads in _HEADS),
    "cuda": (Shape(64, 16_000),),
}


def measure(
    kind: "type[CpuBatch] | type[CudaBatch]", shapes: Sequence[Shape], rounds: int
) -> list[Row]:
    """Rows of all shapes, with all shares; prints a table."""
    yardstick, found = Yardstick(torch.device(kind.device_type)), []
    for shape in shapes:
        batch = kind(shape)
        for percent, run in SHARES:
            print(f"{shape}, {percent}%", file=sys.stderr)
            batch.share(percent, run)
            samples = take_turns(batch.sides(), rounds, yardstick.rates)
            row: Row = {"shape": str(shape), "shared_percent": percent, "run": run}
            row |= batch.row(samples.rename(columns={kind.bandwidth: "bandwidth"}))
            found.append({**row, f"{kind.bandwidth}_gb_per_s": spread(samples[kind.bandwidth])})
        del batch
    table = pd.DataFrame([{name: as_text(one) for name, one in row.items()} for row in found])
    print("\n" + table.to_markdown(index=False, disable_numparse=True), flush=True)
    return found


def _shape(name: str) -> Shape:
    found = re.fullmatch(r"(\d+)x(\d+)-(\d+)/(\d+)x(\d+)(?:\+(\d+))?", name)
    sizes = [int(size) for size in found.groups() if size] if found else [0]
    if not all(sizes) or sizes[2] % sizes[3]:
        expected = "REQUESTSxTOKENS-HEADS/KV_HEADSxDIM[+ROTATED]"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {name!r}")
    return Shape(*sizes)


@dataclass(frozen=True)
class Options:
    shapes: tuple[Shape, ...] = option(SHAPES["cpu"], "on the CPU", read=commas(_shape))
    rounds: int = option(7, "of a setting", least=1)
    device: str = option("cuda" if torch.cuda.is_available() else "cpu", choices=SHAPES)
    output: Path = option(Path("build/bench/kernels.json"), "file of the figures")


def work(options: Options) -> None:
    found: dict[str, Any] = {"machine": describe_machine(), "versions": describe_versions()}
    prepared: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if options.device == "cpu":
        # Before SGLang is imported: the platform our backend serves on.
        os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
        from eval.bench.attention_cpu import CpuBatch as kind
        from eval.bench.attention_cpu import outside_a_server

        prepared = outside_a_server()
        found |= {"device": f"CPU, {torch.get_num_threads()} threads"}
    else:
        from eval.bench.attention_cuda import CudaBatch as kind  # type: ignore[assignment]

        found |= {"device": torch.cuda.get_device_name()}
    torch.manual_seed(5)
    with prepared, torch.inference_mode():
        shapes = options.shapes if options.device == "cpu" else SHAPES["cuda"]
        rows = measure(kind, shapes, options.rounds)
    # What was measured on another device stays.
    known = json.loads(options.output.read_text()) if options.output.is_file() else {}
    known[options.device] = {**found, "rounds": options.rounds, "rows": rows}
    write_json(options.output, known)
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    command.run(Options, work)
