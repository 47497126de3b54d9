# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention``: decode attention, ours against SGLang's and FlashInfer's.

On the CPU our backend and SGLang's torch-native, on a CUDA device our kernels and FlashInfer's,
each on one pool, in turn, beside the memory bandwidth. ``--growth`` adds curves and their picture,
``--server`` two servers of the embedded model. Writes ``build/bench/kernels.json``.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eval.bench import at_least
from eval.bench.attention_curves import SHAPES, draw, measure
from eval.bench.idle import compare
from eval.bench.turns import spread
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import write_whole
from sglang_reasoncache.platform import PLATFORM_NAME

#: Of the CPU's table.
_SHAPES = {str(shape): shape for shape in SHAPES["cpu"][""]}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.attention", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add(
        "--shapes", nargs="*", choices=_SHAPES, default=[*_SHAPES], help="On the CPU (default all)."
    )
    add("--rounds", type=at_least(1), default=7, help="Rounds a setting (default 7).")
    add("--growth", action="store_true", help="Also curves, and their picture.")
    add("--server", action="store_true", help="Also compare two servers.")
    add("--server-rounds", type=at_least(1), default=4, help="Default 4.")
    add("--output", type=Path, default=Path("build/bench/kernels.json"))
    return parser.parse_args(argv)


def record(path: Path, device: str, figures: dict[str, Any]) -> None:
    """Add to the results on disk; draws the curves of all devices where there are new ones."""
    found = json.loads(path.read_text())
    found.setdefault(device, {}).update(figures)
    write_whole(path, json.dumps(found, indent=1) + "\n")
    if "growth" in figures:
        parts = [found[name] for name in SHAPES if "growth" in found.get(name, {})]
        draw({part["device"]: part["growth"] for part in parts}, path.with_suffix(".png"))


def measure_device(device: str, options: argparse.Namespace) -> None:
    """Table, curves and servers of one device, as far as they are asked for."""
    put = functools.partial(record, options.output, device)
    curves = dict(SHAPES[device])
    table = curves.pop("")
    prepared: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if device == "cpu":
        # Before SGLang is imported: the platform our backend serves on.
        os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
        from eval.bench.attention_cpu import CpuBatch as kind
        from eval.bench.attention_cpu import outside_a_server

        threads, table = torch.get_num_threads(), [_SHAPES[name] for name in options.shapes]
        prepared = outside_a_server()
        put({"device": f"CPU, {threads} threads", "threads": threads})
    else:
        from eval.bench.attention_cuda import CudaBatch as kind  # type: ignore[assignment]
        from eval.bench.distance import of_copy

        put({"device": torch.cuda.get_device_name()})
        put({"distance_fraction_of_copy": of_copy()})
    torch.manual_seed(5)
    with prepared, torch.inference_mode():
        if table:
            rows = measure(kind, {"": table}, options.rounds)
            if not rows:
                raise SystemExit(f"the memory of {device} is too small for the table")
            put({**kind.key_figures(rows), "rows": rows})
        if options.growth:
            put({"growth": measure(kind, curves, min(3, options.rounds))})
    if options.server and device == "cpu":
        put(serve(options.server_rounds, options.output.parent))


def serve(rounds: int, logs: Path) -> dict[str, Any]:
    """Output tokens/s of two stock servers that differ in the attention backend alone."""
    from sglang_reasoncache import compat

    body = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 512}
    native, ours = names = ("torch_native", compat.CPU_BACKEND)
    flags = ["--max-total-tokens", "40000", "--attention-backend"]
    found, _ = compare({name: [*flags, name] for name in names}, body, rounds, logs / "attention")
    speeds = found["throughput"]
    return {
        "server_tokens_per_s_ratio": spread(speeds[ours] / speeds[native])["median"],
        "server_tokens_per_s": {name: speeds[name].tolist() for name in names},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a device's part failed. Each has a process of its own: in that of
    the CPU SGLang is told there is no GPU."""
    # Asks the driver's library whether there is a GPU, and leaves CUDA alone in this process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    options = parse(argv)
    about = {"machine": describe_machine(), "versions": describe_versions()}
    write_whole(options.output, json.dumps({**about, "rounds": options.rounds}))
    status = 0
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        spawn = multiprocessing.get_context("spawn")
        part = spawn.Process(target=measure_device, args=(device, options))
        part.start()
        part.join()
        if part.exitcode:
            status = 1
            print(f"the part of {device} failed, see above", file=sys.stderr)
    print(f"\nwrote {options.output}")
    return status


if __name__ == "__main__":
    sys.exit(main())
