# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention``: decode attention, ours against SGLang's and FlashInfer's.

On one pool, in turn, beside the memory bandwidth; ``--server`` adds two servers of the embedded model.
Writes ``build/bench/kernels.json``, a part for each device."""

import argparse
import contextlib
import functools
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from eval import command
from eval.bench.attention_batch import SHARES, Shape
from eval.bench.turns import Yardstick, as_text, spread, take_turns
from eval.command import option
from eval.measures.figures import of_cells
from eval.methods import DENSE
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import Cell, write_json
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
    """Rows of all shapes that fit into the device's memory, with all shares; prints a table."""
    yardstick = Yardstick(torch.device(kind.device_type))
    found, lines = [], []
    for shape in shapes:
        batch = kind(shape) if kind.fits(shape) else None
        for percent, run in SHARES:
            row: Row = {"shape": str(shape), "shared_percent": percent, "run": run}
            if batch is not None:
                print(f"{shape}, {percent}%", file=sys.stderr)
                batch.share(percent, run)
                samples = take_turns(batch.sides(), rounds, yardstick.rates)
                row |= batch.row(samples.rename(columns={kind.bandwidth: "bandwidth"}))
                row[f"{kind.bandwidth}_gb_per_s"] = spread(samples[kind.bandwidth])
                found.append(row)
            lines.append({name: as_text(value) for name, value in row.items()})
        del batch
    table = pd.DataFrame(lines).fillna("no memory")
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
    shapes: tuple[Shape, ...] = option(SHAPES["cpu"], "on the CPU", type=_shape)
    rounds: int = option(7, "of a setting", least=1)
    device: str = option(
        "cuda" if torch.cuda.is_available() else "cpu", choices=tuple(SHAPES), flag="--devices"
    )
    server: bool = option(False, "on the CPU also compare two servers")
    server_rounds: int = option(2, "of two servers", least=1)
    output: Path = option(Path("build/bench/kernels.json"), "file of the figures")


def record(path: Path, device: str, figures: dict[str, Any]) -> None:
    """Add to the results of a device on disk; those of another device stay."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    found.setdefault(device, {}).update(figures)
    write_json(path, found)


def serve(rounds: int, logs: Path) -> dict[str, Any]:
    """Output tokens/s of two stock servers that differ in the attention backend alone."""
    # lm-eval takes seconds to load, which no other part of this needs.
    from eval.bench.sides import fresh
    from eval.runs.options import RunOptions
    from eval.runs.work import run
    from sglang_reasoncache import compat

    native, ours = names = ("torch_native", compat.CPU_BACKEND)
    out, speeds = fresh(logs, "attention"), defaultdict(list)
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            flags = ("--attention-backend", name)
            asked: dict[str, Any] = {"tasks": ("noise",), "methods": (DENSE,), "seeds": (number,)}
            folder = out / f"{name}-{number}"
            run(RunOptions(**asked, limit=32, device="cpu", server_flags=flags), folder)
            cell = Cell(folder, "noise", DENSE, number).whole()
            speeds[name].append(of_cells([cell]).tokens_per_s or 0.0)
    ratios = [one / other for one, other in zip(speeds[ours], speeds[native], strict=True)]
    return {
        "server_tokens_per_s_ratio": spread(ratios)["median"],
        "server_tokens_per_s": dict(speeds),
    }


def work(options: Options) -> None:
    """Table and servers of one device. Raises ValueError: its memory is too small."""
    put = functools.partial(record, options.output, options.device)
    put({"machine": describe_machine(), "versions": describe_versions(), "rounds": options.rounds})
    prepared: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if options.device == "cpu":
        # Before SGLang is imported: the platform our backend serves on.
        os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
        from eval.bench.attention_cpu import CpuBatch as kind
        from eval.bench.attention_cpu import outside_a_server

        threads, prepared = torch.get_num_threads(), outside_a_server()
        put({"device": f"CPU, {threads} threads", "threads": threads})
    else:
        from eval.bench.attention_cuda import CudaBatch as kind  # type: ignore[assignment]
        from eval.bench.distance import of_copy

        put({"device": torch.cuda.get_device_name()})
        put({"distance_fraction_of_copy": of_copy("cuda")})
    torch.manual_seed(5)
    with prepared, torch.inference_mode():
        shapes = options.shapes if options.device == "cpu" else SHAPES["cuda"]
        rows = measure(kind, shapes, options.rounds)
        if not rows:
            raise ValueError(f"the memory of {options.device} is too small for the table")
        put({**kind.key_figures(rows), "rows": rows})
    if options.server and options.device == "cpu":
        put(serve(options.server_rounds, options.output.parent))
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    command.run(Options, work)
