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
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils import collect_env

from eval.bench import attention_cpu, attention_growth
from eval.bench.attention_growth import Setting
from eval.bench.attention_rig import Rig, Row, Shape, spread, take_turns, text
from eval.bench.bandwidth import Yardstick

DEVICES = ("cpu", "cuda")
_SHAPES = {str(shape): shape for shape in attention_cpu.SHAPES}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.attention", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--devices", type=_words, help="cpu, cuda or both with a comma (default: what is there).")
    add("--shapes", type=_words, default=[*_SHAPES], help="Of the CPU's table: default all; none.")
    add("--shared", type=_percents, default=[0, 22, 50], help="Of entries (default 0,22,50).")
    add("--rounds", type=_positive, default=7, help="Rounds a setting (default 7).")
    add("--threads", type=_positive, help="All of them (default: as PyTorch has).")
    add("--growth", action="store_true", help="Also curves, and their picture.")
    add("--growth-rounds", type=_positive, default=3, help="Default 3.")
    add("--server", action="store_true", help="Also compare two servers.")
    add("--server-rounds", type=_positive, default=4, help="Default 4.")
    add("--part", action="store_true", help=argparse.SUPPRESS)
    add("--output", type=Path, default=Path("build/bench/kernels.json"))
    options = parser.parse_args(argv)
    options.shapes = [name for name in options.shapes if name != "none"]
    there = [d for d in DEVICES if d == "cpu" or torch.cuda.is_available()]
    options.devices = options.devices or there
    for name, known in (("shapes", _SHAPES), ("devices", DEVICES)):
        unknown = [word for word in getattr(options, name) if word not in known]
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    if not set(options.devices) <= set(there):
        parser.error(f"--devices cuda: torch {torch.__version__} sees no CUDA device")
    return options


def _words(text: str) -> list[str]:
    return text.split(",")


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def _percents(text: str) -> list[int]:
    found = [int(word) if word.isdecimal() else -1 for word in text.split(",")]
    if not all(0 <= percent <= 90 for percent in found):
        raise argparse.ArgumentTypeError(f"must be whole numbers from 0 to 90, got {text}")
    return found


class Results:
    """What is measured so far, on disk after each part: one that fails takes nothing with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, device: str, figures: dict[str, Any]) -> None:
        """``figures`` of "cpu" or "cuda", beside those that it has already."""
        self._found.setdefault(device, {}).update(figures)
        self.write()
        if "growth" in figures:
            found = (self._found[device] for device in DEVICES if device in self._found)
            pictures = {one["device"]: one["growth"] for one in found if "growth" in one}
            attention_growth.draw(pictures, self._path.with_suffix(".png"))

    def write(self, **about: Any) -> None:
        self._found |= about
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")


def measure(rig: type[Rig], wanted: Sequence[Setting], rounds: int) -> list[Row]:
    """Every setting that fits into the device's memory, printed as a Markdown table.

    Returns:
        Rows; of settings on a curve points, with ``setting``, ``ms`` by curve and ``read_ms``,
        what reading each entry's K and V once takes at the machine's bandwidth.
    """
    yardstick = Yardstick(torch.device(rig.device_type), rig.yardstick_gb)
    bandwidth = yardstick.read if rig.bandwidth == "read_gb_per_s" else yardstick.copy
    found: list[Row] = []
    lines: list[dict[str, str]] = []
    for shape, group in itertools.groupby(wanted, key=lambda setting: setting.shape):
        batch = rig(shape) if rig.fits(shape) else None
        for setting in group:
            row: Row = {"shape": str(shape), "shared_percent": setting.shared_percent}
            line: dict[str, str] = {"growth over": setting.axis} if setting.axis else {}
            if batch is not None:
                print(f"{setting.axis} {shape}, {setting.shared_percent}%", file=sys.stderr)
                batch.share(setting.shared_percent)
                sides = batch.sides(curves_only=bool(setting.axis))
                samples = take_turns(sides, bandwidth, rounds, rig.warm_up_rounds)
                row |= batch.row(samples) | {rig.bandwidth: spread(samples["bandwidth"])}
                found.append(_point(rig, setting, row) if setting.axis else row)
            shown = ("shape", "shared_percent", *rig.times) if setting.axis else rig.columns
            for name in shown:
                head, digits = rig.columns[name]
                line[head] = text(row.get(name, "no memory"), digits)
            lines.append(line)
        del batch
    print("\n" + pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True), flush=True)
    return found


def _point(rig: type[Rig], setting: Setting, row: Row) -> Row:
    ours, theirs = (row[name] for name in rig.times)
    # The other side reads shared entries like any other: one curve of it is enough.
    others = {rig.other: theirs} if setting.curve == "ours" else {}
    read_ms = setting.shape.layer_bytes / row[rig.bandwidth]["median"] / 1e6
    return {"setting": asdict(setting), "ms": {setting.curve: ours, **others}, "read_ms": read_ms}


def measure_cpu(options: argparse.Namespace, results: Results) -> None:
    """Table, curves and servers, as far as they are asked for."""
    from sglang_reasoncache.platform import PLATFORM_NAME

    # Before SGLang is imported: the platform our backend serves on.
    os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    results.add("cpu", {"device": f"CPU, {threads} threads", "threads": threads})
    with attention_cpu.backends():
        shapes = [_SHAPES[name] for name in options.shapes]
        measure_device("cpu", attention_cpu.CpuRig, shapes, attention_cpu.GROWTH, options, results)
    if options.server:
        from eval.bench.attention_servers import serve

        results.add("cpu", serve(options.server_rounds, options.output.parent))


def measure_cuda(options: argparse.Namespace, results: Results) -> None:
    """Table, the distance's bandwidth, and curves if they are asked for."""
    from eval.bench import attention_cuda as cuda

    results.add("cuda", {"device": torch.cuda.get_device_name()})
    with torch.inference_mode():
        results.add("cuda", {"distance_fraction_of_copy": cuda.distance_of_copy()})
        measure_device("cuda", cuda.CudaRig, cuda.SHAPES, cuda.GROWTH, options, results)


def measure_device(
    name: str,
    rig: type[Rig],
    shapes: Sequence[Shape],
    growth: Sequence[Setting],
    options: argparse.Namespace,
    results: Results,
) -> None:
    """Table and curves of one device."""
    if shapes:
        table = [Setting("", shape, percent) for shape in shapes for percent in options.shared]
        rows = measure(rig, table, options.rounds)
        if not rows:
            raise SystemExit(f"the memory of {name} is too small for the table")
        results.add(name, {**rig.key_figures(rows), "rows": rows})
    if options.growth:
        results.add(name, {"growth": measure(rig, growth, options.growth_rounds)})


def describe() -> dict[str, Any]:
    """Machine and versions that the results belong to."""
    found = collect_env.get_env_info()._asdict()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False
    )
    machine = ("os", "cpu_info", "nvidia_gpu_models", "nvidia_driver_version")
    versions = {name: importlib.metadata.version(name) for name in ("sglang", "transformers")}
    versions |= {"torch": found["torch_version"], "python": found["python_version"]}
    return {
        "machine": {name: found[name] for name in machine},
        "versions": versions | {"commit": commit.stdout.strip()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where a device's part failed.

    Each device is measured in a process of its own: in that of the CPU SGLang is told there is
    no GPU.
    """
    # Asks the driver's library whether there is a GPU, and leaves CUDA alone in this process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parse(arguments)
    if options.part:
        part = measure_cuda if options.devices == ["cuda"] else measure_cpu
        part(options, Results(options.output))
        return 0
    options.output.unlink(missing_ok=True)
    Results(options.output).write(**describe(), rounds=options.rounds)
    failed = []
    for device in reversed(options.devices):
        command = [sys.executable, "-m", "eval.bench.attention", *arguments]
        command += ["--devices", device, "--part"]
        if subprocess.run(command, check=False).returncode:
            failed.append(device)
    print(f"\nwrote {options.output}")
    for device in failed:
        print(f"the part of {device} failed, see above", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
