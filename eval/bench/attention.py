# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention``: decode attention, ours against SGLang's and FlashInfer's.

On the CPU our backend and SGLang's torch-native are called as SGLang calls them, on one pool
of SGLang's, round by round in turn. The memory bandwidth is measured in between, which
empties the caches; slots lie as requests that decode together get them. ``--growth`` adds
curves over tokens, requests and shared entries, drawn beside the results; ``--server`` two
servers of the embedded model. With a CUDA device, :mod:`eval.bench.attention_cuda` in a
process of its own. Prints Markdown tables, writes ``build/bench/kernels.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eval.bench.attention_cpu import GROWTH, SHAPES, key_figures, measure_growth, measure_table
from eval.bench.attention_growth import Point, draw, load
from eval.bench.attention_servers import serve
from eval.runs.machine import describe_machine, describe_versions
from sglang_reasoncache.platform import PLATFORM_NAME

DEVICES = ("cpu", "cuda")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.attention", description=__doc__.splitlines()[0]
    )
    known = {str(shape): shape for shape in SHAPES}
    parser.add_argument(
        "--devices", default="all", help="cpu, cuda or both with a comma (default: what is there)."
    )
    parser.add_argument(
        "--shapes", default=",".join(known), help="Of the CPU's table. Default: all; or none."
    )
    parser.add_argument("--shared", default="0,22,50", help="Percent of entries (default 0,22,50).")
    parser.add_argument("--rounds", type=int, default=7, help="Rounds a setting (default 7).")
    parser.add_argument("--threads", type=int, help="All of them (default: as PyTorch has).")
    parser.add_argument("--growth", action="store_true", help="Also curves, and their picture.")
    parser.add_argument("--growth-rounds", type=int, default=3, help="Default 3.")
    parser.add_argument("--server", action="store_true", help="Also compare two servers.")
    parser.add_argument("--server-rounds", type=int, default=4, help="Default 4.")
    parser.add_argument("--output", type=Path, default=Path("build/bench/kernels.json"))
    options = parser.parse_args(argv)
    names = [] if options.shapes == "none" else options.shapes.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"--shapes: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    options.shapes = [known[name] for name in names]
    try:
        options.shared = [int(word) for word in options.shared.split(",")]
    except ValueError:
        parser.error(f"--shared must be whole numbers with commas, got {options.shared}")
    if not all(0 <= percent <= 90 for percent in options.shared):
        parser.error(f"--shared must be between 0 and 90, got {options.shared}")
    for name in ("rounds", "growth_rounds", "server_rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.devices == "all":
        options.devices = [d for d in DEVICES if d == "cpu" or torch.cuda.is_available()]
    else:
        options.devices = options.devices.split(",")
        if not set(options.devices) <= set(DEVICES):
            parser.error(f"--devices: {', '.join(DEVICES)}, got {','.join(options.devices)}")
        if "cuda" in options.devices and not torch.cuda.is_available():
            parser.error(f"--devices cuda: torch {torch.__version__} sees no CUDA device")
    return options


class Results:
    """What is measured so far, on disk after each part: one that fails takes nothing with it."""

    def __init__(self, path: Path, **about: Any) -> None:
        self._path = path
        self._found: dict[str, Any] = about
        self._pictures: dict[str, list[Point]] = {}

    def add(self, device: str, figures: dict[str, Any]) -> None:
        """``figures`` of "cpu" or "cuda", beside those that it has already."""
        self._found.setdefault(device, {}).update(figures)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
        if "growth" in figures:
            name = self._found[device]["device"]
            self._pictures[name] = load(figures["growth"])
            draw(self._pictures, self._path.with_suffix(".png"))


def measure_cpu(options: argparse.Namespace, results: Results) -> None:
    """Table, curves and servers, as far as they are asked for."""
    # Before SGLang is imported: the platform our backend serves on.
    os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    results.add("cpu", {"device": f"CPU, {threads} threads", "threads": threads})
    if options.shapes:
        rows = measure_table(options.shapes, options.shared, options.rounds)
        as_rows = [{**asdict(row), "of_read": row.of_read} for row in rows]
        results.add("cpu", {**key_figures(rows), "rows": as_rows})
    if options.growth:
        points = measure_growth(GROWTH, options.growth_rounds)
        results.add("cpu", {"growth": [asdict(point) for point in points]})
    if options.server:
        results.add("cpu", serve(options.server_rounds, options.output.parent))


def measure_cuda(options: argparse.Namespace, results: Results) -> bool:
    """By a process of its own: in this one SGLang is told there is no GPU. False if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cuda.json")
        command = [sys.executable, "-m", "eval.bench.attention_cuda", "--json", str(path)]
        command += ["--rounds", str(options.rounds), *(["--growth"] if options.growth else [])]
        status = subprocess.run(command, check=False).returncode
        if path.exists():
            results.add("cuda", json.loads(path.read_text(encoding="utf-8")))
    return status == 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 where the GPU's part failed."""
    # Asks the driver's library whether there is a GPU, and leaves CUDA alone in this process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    options = parse(argv)
    about = {"machine": describe_machine(), "versions": describe_versions()}
    results = Results(options.output, **about, rounds=options.rounds)
    served = "cuda" not in options.devices or measure_cuda(options, results)
    if "cpu" in options.devices:
        measure_cpu(options, results)
    print(f"\nwrote {options.output}")
    if not served:
        print("the GPU's part failed, see above", file=sys.stderr)
    return int(not served)


if __name__ == "__main__":
    sys.exit(main())
