# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention``: decode attention, ours against SGLang's and FlashInfer's.

On the CPU our backend and SGLang's torch-native, on a CUDA device our kernels and FlashInfer's,
each on one pool, round by round in turn. The memory bandwidth is measured in between, which
empties the caches; slots lie as requests that decode together get them. ``--growth`` adds
curves over tokens, requests and shared entries, drawn beside the results; ``--server`` two
servers of the embedded model. Prints Markdown tables, writes ``build/bench/kernels.json``.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from eval.bench.attention_cases import TABLE, Setting, Shape, growth
from eval.bench.attention_picture import draw
from eval.bench.attention_rig import Rig, measure
from eval.runs.config import describe_machine, describe_versions
from sglang_reasoncache.platform import PLATFORM_NAME

_SHAPES = {str(shape): shape for shape in TABLE["cpu"]}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.attention", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    there = [name for name in TABLE if name == "cpu" or torch.cuda.is_available()]
    shapes, devices = _words(_SHAPES), _words(TABLE)
    percents = _words([str(percent) for percent in range(91)], "whole numbers from 0 to 90")
    add("--devices", type=devices, help="cpu, cuda or both with a comma (default: what is there).")
    add("--shapes", type=shapes, default=[*_SHAPES], help="Of the CPU's table: default all; none.")
    add("--shared", type=percents, default=["0", "22", "50"], help="Of entries (default 0,22,50).")
    add("--rounds", type=_positive, default=7, help="Rounds a setting (default 7).")
    add("--threads", type=_positive, help="All of them (default: as PyTorch has).")
    add("--growth", action="store_true", help="Also curves, and their picture.")
    add("--growth-rounds", type=_positive, default=3, help="Default 3.")
    add("--server", action="store_true", help="Also compare two servers.")
    add("--server-rounds", type=_positive, default=4, help="Default 4.")
    add("--output", type=Path, default=Path("build/bench/kernels.json"))
    options = parser.parse_args(argv)
    options.devices = options.devices or there
    if not set(options.devices) <= set(there):
        parser.error(f"--devices cuda: torch {torch.__version__} sees no CUDA device")
    return options


def _words(known: Collection[str], there: str = "") -> Callable[[str], list[str]]:
    """Parses words of ``known`` with commas between; "none" is no word."""

    def words(text: str) -> list[str]:
        found = [word for word in text.split(",") if word != "none"]
        unknown = ", ".join(word for word in found if word not in known)
        if unknown:
            message = f"unknown {unknown}; there are {there or ', '.join(known)}"
            raise argparse.ArgumentTypeError(message)
        return found

    return words


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def record(path: Path, device: str, figures: dict[str, Any]) -> None:
    """Add to the results on disk, so that a part that fails later loses none.

    Draws the curves of all devices where there are new ones.
    """
    found = json.loads(path.read_text())
    found.setdefault(device, {}).update(figures)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if "growth" in figures:
        parts = [found[name] for name in TABLE if "growth" in found.get(name, {})]
        draw({part["device"]: part["growth"] for part in parts}, path.with_suffix(".png"))


def measure_device(device: str, options: argparse.Namespace) -> None:
    """Table, curves and servers of one device, as far as they are asked for."""
    rig: type[Rig]
    put = functools.partial(record, options.output, device)
    shapes: Sequence[Shape] = TABLE[device]
    if device == "cpu":
        # Before SGLang is imported: the platform our backend serves on.
        os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
        from eval.bench.attention_cpu import CpuRig as rig

        torch.set_num_threads(options.threads or torch.get_num_threads())
        threads, shapes = torch.get_num_threads(), [_SHAPES[name] for name in options.shapes]
        put({"device": f"CPU, {threads} threads", "threads": threads})
    else:
        from eval.bench.attention_cuda import CudaRig as rig
        from eval.bench.attention_cuda import distance_of_copy

        put({"device": torch.cuda.get_device_name()})
        put({"distance_fraction_of_copy": distance_of_copy()})
    with rig.prepared(), torch.inference_mode():
        if shapes:
            table = [Setting("", shape, int(part)) for shape in shapes for part in options.shared]
            rows = measure(rig, table, options.rounds)
            if not rows:
                raise SystemExit(f"the memory of {device} is too small for the table")
            put({**rig.key_figures(rows), "rows": rows})
        if options.growth:
            put({"growth": measure(rig, growth(device), options.growth_rounds)})
    if options.server and device == "cpu":
        from eval.bench.attention_servers import serve

        put(serve(options.server_rounds, options.output.parent))


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a device's part failed.

    Each device is measured in a process of its own: in that of the CPU SGLang is told there is
    no GPU.
    """
    # Asks the driver's library whether there is a GPU, and leaves CUDA alone in this process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    options = parse(argv)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    about = {"machine": describe_machine(), "versions": describe_versions()}
    options.output.write_text(json.dumps({**about, "rounds": options.rounds}), encoding="utf-8")
    status = 0
    for device in reversed(options.devices):
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
