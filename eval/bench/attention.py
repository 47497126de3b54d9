# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention``: decode attention, ours against SGLang's and FlashInfer's.

On one pool, in turn, beside the memory bandwidth. ``--growth`` adds curves and their picture,
``--server`` two servers of the embedded model. Writes ``build/bench/kernels.json``."""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import torch

from eval.bench import at_least
from eval.bench.attention_batch import RUN, SHARES, Shape
from eval.bench.idle import compare
from eval.bench.turns import Yardstick, as_text, spread, take_turns
from eval.report.style import light_grid, save, text
from eval.runs.config import describe_machine, describe_versions
from eval.runs.folder import write_whole
from sglang_reasoncache.platform import PLATFORM_NAME

if TYPE_CHECKING:
    from eval.bench.attention_cpu import CpuBatch
    from eval.bench.attention_cuda import CudaBatch

#: What one setting's samples come to: JSON, times as :func:`eval.bench.turns.spread`.
Row = dict[str, Any]

_HEADS = ((4, 2, 64), (32, 8, 128))
#: Shapes of each device by axis; results are named after 32x1000 and 64x16000.
SHAPES = {
    "cpu": {
        "": [Shape(*size, *heads) for size in ((32, 1000), (8, 16_000)) for heads in _HEADS],
        "tokens": [Shape(8, tokens) for tokens in (250, 1000, 4000, 16_000)],
        "requests": [Shape(requests, 1000) for requests in (1, 4, 16, 64)],
        "shared_percent": [Shape(32, 1000)],
        "rotations": [Shape(32, 1000)],
    },
    "cuda": {
        "": [Shape(64, 16_000)],
        "tokens": [Shape(64, tokens) for tokens in (1000, 4000, 16_000, 32_000)],
        "requests": [Shape(requests, 16_000) for requests in (1, 8, 32, 128)],
        "shared_percent": [Shape(64, 16_000)],
        "rotations": [Shape(64, 16_000)],
    },
}
#: Percents of the entries that are shared, in runs of how many tokens, and how many rotations a
#: tile has in place of a percentage; the label of an axis.
_AXES: dict[str, tuple[tuple[tuple[int, ...], ...], str]] = {
    "": (SHARES, ""),
    "tokens": (((0, RUN), (22, RUN)), "tokens a request, {requests} requests"),
    "requests": (((0, RUN), (22, RUN)), "requests of {tokens:,} tokens"),
    "shared_percent": (
        tuple((percent, RUN) for percent in (0, 10, 22, 35, 50, 75)),
        "% shared, {requests} x {tokens:,} tokens",
    ),
    "rotations": (
        tuple((0, 16, rotations) for rotations in (0, 1, 2, 4, 8, 16)),
        "rotations a tile, runs of 16, {requests} x {tokens:,} tokens",
    ),
}


def measure(
    kind: "type[CpuBatch] | type[CudaBatch]", shapes: Mapping[str, Sequence[Shape]], rounds: int
) -> list[Row]:
    """Shapes by axis with all shares that fit into the device's memory; prints a Markdown table.
    Returns rows; on a curve points (:func:`point`)."""
    yardstick = Yardstick(torch.device(kind.device_type))
    found, lines = [], []
    for axis, shape in ((axis, shape) for axis, several in shapes.items() for shape in several):
        batch = kind(shape) if kind.fits(shape) else None
        for percent, run, *rotations in _AXES[axis][0]:
            row: Row = {"shape": str(shape), "shared_percent": percent, "run": run}
            row |= {"rotations": rotations[0]} if rotations else {}
            if batch is not None:
                print(f"{axis} {shape}, {percent}% {rotations}", file=sys.stderr)
                batch.share(percent, run, *rotations)
                samples = take_turns(batch.sides(), rounds, yardstick.rates)
                row |= batch.row(samples.rename(columns={kind.bandwidth: "bandwidth"}))
                row[f"{kind.bandwidth}_gb_per_s"] = spread(samples[kind.bandwidth])
                found.append(point(kind, axis, shape, row) if axis else row)
            begin = {"growth over": axis} if axis else {}
            lines.append(begin | {name: as_text(value) for name, value in row.items()})
        del batch
    table = pd.DataFrame(lines).fillna("no memory")
    print("\n" + table.to_markdown(index=False, disable_numparse=True), flush=True)
    return found


def point(kind: "type[CpuBatch] | type[CudaBatch]", axis: str, shape: Shape, row: Row) -> Row:
    """Of a curve: ``setting``, ``ms`` by curve, and ``read_ms``, what reading each entry's K and
    V once takes at the machine's bandwidth."""
    ours, theirs, other = kind.times
    percent = row["shared_percent"]
    # The other side reads shared entries like any other: one curve of it is enough.
    if axis == "rotations":
        ms = {"ours": row[ours], "each position by itself": row["each_ms"]}
    elif axis == "shared_percent" or not percent:
        ms = {"ours": row[ours], other: row[theirs]}
    else:
        ms = {f"ours, {percent}% shared": row[ours]}
    setting = {"axis": axis, "shape": asdict(shape), "shared_percent": percent}
    setting |= {"rotations": row["rotations"]} if axis == "rotations" else {}
    rate = row[f"{kind.bandwidth}_gb_per_s"]["median"]
    return {"setting": setting, "ms": ms, "read_ms": shape.layer_bytes / rate / 1e6}


def curves(devices: Mapping[str, Sequence[Row]]) -> pd.DataFrame:
    """``device``, ``panel``, ``axis``, ``value`` on it, ``curve`` and ``ms``: median and quartiles
    of each point, a line each."""
    lines = []
    for device, points in devices.items():
        for one in points:
            setting, ms = one["setting"], one["ms"]
            at = {"device": text(device), "axis": setting["axis"]}
            at["panel"] = _AXES[setting["axis"]][1].format(**setting["shape"])
            at["value"] = {**setting["shape"], **setting}[setting["axis"]]
            lines += [
                {**at, "curve": name, "ms": value}
                for name, figure in ms.items()
                for value in figure.values()
            ]
            lines.append({**at, "curve": "reading K and V once", "ms": one["read_ms"]})
    return pd.DataFrame(lines)


def draw(devices: Mapping[str, Sequence[Row]], path: Path, marks: Mapping[str, float]) -> None:
    """A row of pictures for each device, by its name; bands are quartiles. ``marks`` are rotations a
    tile, by what has so many."""
    found = curves(devices)
    grid = sns.relplot(
        found, kind="line", x="value", y="ms", hue="curve", style="curve", row="device",
        col="axis", palette="colorblind", markers=True, dashes=False, estimator="median",
        errorbar=("pi", 100), height=3.6, facet_kws={"sharex": False, "sharey": False},
    )  # fmt: skip
    for (device, axis), panel in grid.axes_dict.items():
        shown = found[(found["device"] == device) & (found["axis"] == axis)]
        panel.set(title=device, xlabel=shown["panel"].iloc[0], ylabel="ms a layer")
        light_grid(panel)
        for name, rotations in marks.items() if axis == "rotations" else ():
            panel.axvline(rotations, color="0.5", linestyle=":")
            height = panel.get_xaxis_transform()
            panel.text(
                rotations, 0.98, text(name), rotation=90, va="top", fontsize=7, transform=height
            )
        if axis not in ("shared_percent", "rotations"):
            values = shown["value"].unique()
            panel.loglog()
            panel.set_xticks(values, [f"{value:,}" for value in values], minor=False)
            panel.minorticks_off()
    grid.tight_layout()
    save(grid.figure, path)
    plt.close(grid.figure)


def _shape(name: str) -> Shape:
    found = re.fullmatch(r"(\d+)x(\d+)-(\d+)/(\d+)x(\d+)", name)
    sizes = [int(size) for size in found.groups()] if found else [0]
    if not all(sizes) or sizes[2] % sizes[3]:
        expected = "REQUESTSxTOKENS-HEADS/KV_HEADSxDIM"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {name!r}")
    return Shape(*sizes)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.attention", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    table = SHAPES["cpu"][""]
    told = f"Rows of the CPU's table (default {' '.join(map(str, table))})."
    add("--shapes", nargs="*", type=_shape, default=table, metavar="SHAPE", help=told)
    add("--rounds", type=at_least(1), default=7, help="Rounds a setting (default 7).")
    add("--growth", action="store_true", help="Also curves, and their picture.")
    traces = "Recorded responses, JSONL: what their plans hold, marked on the curves."
    add("--traces", nargs="+", type=Path, default=[], metavar="FILE", help=traces)
    add("--devices", nargs="+", choices=[*SHAPES], metavar="DEVICE", help="Default: all there are.")
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
        marks = {name: figures["a_tile"] for name, figures in found.get("traces", {}).items()}
        growth = {part["device"]: part["growth"] for part in parts}
        draw(growth, path.with_suffix(".png"), marks)


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

        threads, table = torch.get_num_threads(), options.shapes
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
    """The exit status: 1 where a device's part failed; each has a process of its own."""
    # Asks the driver's library whether there is a GPU, and leaves CUDA alone in this process.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    options = parse(argv)
    about = {"machine": describe_machine(), "versions": describe_versions()}
    if options.traces:
        from eval.bench.recorded import rotations_of

        try:
            about["traces"] = rotations_of(options.traces)
        except (OSError, ValueError) as error:
            raise SystemExit(f"--traces: {error}") from error
        print(pd.DataFrame(about["traces"]).T.to_markdown())
    write_whole(options.output, json.dumps({**about, "rounds": options.rounds}))
    status = 0
    found = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    for device in options.devices or found:
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
