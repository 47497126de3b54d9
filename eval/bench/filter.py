# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.filter TRACES``: what the filter costs, stage by stage and in a server.

TRACES is a JSONL file of responses, or a folder of them. Prints Markdown tables
and writes every figure to a JSON file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eval.bench import distance, idle
from eval.bench.stage1 import (
    Replay,
    make_engine,
    peak_megabytes,
    replay,
    segment_microseconds,
    spelling_of,
)
from eval.redundancy.rows import texts_of
from sglang_reasoncache.filter.settings import FilterConfig

_AT_ONCE = 8
_PYTHON_RESPONSES = 8


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.filter", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "traces", type=Path, help="JSONL file, or folder of files named aime*.jsonl."
    )
    parser.add_argument(
        "--tokenizer", help="Hugging Face folder; trained on the traces by default."
    )
    parser.add_argument("--block", type=int, default=16, help="Tokens per block (default 16).")
    parser.add_argument("--rounds", type=int, default=32, help="Server rounds; 0: no servers.")
    parser.add_argument("--output", type=Path, default=Path("build/bench/filter.json"))
    options = parser.parse_args(argv)
    if not options.traces.exists():
        parser.error(f"TRACES: {options.traces} does not exist")
    return options


def stage1(options: argparse.Namespace) -> dict[str, Any]:
    """Stage 1 on the traces; prints a table."""
    folder = options.traces.is_dir()
    files = sorted(options.traces.glob("aime*.jsonl")) if folder else [options.traces]
    try:
        texts = texts_of(files)
    except ValueError as error:
        raise SystemExit(
            f"{options.traces} (a folder needs files named aime*.jsonl): {error}"
        ) from error
    tokenizer, spelling = spelling_of(options.tokenizer, texts)
    streams = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    config = FilterConfig(block=options.block)
    found = {
        "native": replay(make_engine("native", config, spelling), streams, _AT_ONCE),
        # A part of the responses: the Python twin takes its time.
        "python": replay(
            make_engine("python", config, spelling), streams[:_PYTHON_RESPONSES], _AT_ONCE
        ),
    }
    print(f"\n{len(texts)} responses, {_AT_ONCE} at a time, block {options.block}, CPU time\n")
    print(
        "| engine | steps | median ms | p99 ms | max ms | growth exponent | handing over, us a feed |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, result in found.items():
        print(
            f"| {name} | {result.steps:,} | {result.median_ms:.4f} | {result.p99_ms:.4f} "
            f"| {result.step_seconds.max() * 1e3:.3f} | {result.growth_exponent:.2f} "
            f"| {result.feed_seconds / result.feeds * 1e6:.1f} |"
        )
    _print_growth(found["native"])
    result = found["native"]
    return {
        "step_ms_median": result.median_ms,
        "step_ms_p99": result.p99_ms,
        "step_ms_max": float(result.step_seconds.max() * 1e3),
        "python_step_ms_median": found["python"].median_ms,
        "python_step_ms_p99": found["python"].p99_ms,
        "growth_exponent": _number(result.growth_exponent),
        "steps": result.steps,
        "tokens": result.tokens,
        "pairs": result.pairs,
        "segment_us_per_token": segment_microseconds(config, spelling, streams),
        "peak_mb_per_20k_tokens": peak_megabytes(config, spelling, streams),
    }


def _print_growth(result: Replay) -> None:
    print("\n| earlier steps | steps | median us | p99 us |\n| --- | --- | --- | --- |")
    edges = [0, 50, 100, 200, 400, 800, 1600, 3200]
    for low, high in itertools.pairwise(edges):
        times = result.step_seconds[(result.history >= low) & (result.history < high)] * 1e6
        if len(times):
            print(
                f"| {low:,} to {high - 1:,} | {len(times):,} | {np.median(times):.1f} "
                f"| {np.percentile(times, 99):.1f} |"
            )


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    results: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    results |= stage1(options)
    print(
        f"\nsegmentation {results['segment_us_per_token']:.3f} us a token, "
        f"peak memory {results['peak_mb_per_20k_tokens']:.2f} MB per 20,000 tokens\n"
    )
    results |= distance.summary()
    # Blocks as they lie when 32 requests decode together; 16 pairs or more at once.
    results["distance_gb_s"] = results["distance_cpu_interleaved_gb_per_s"]
    results["copy_gb_s"] = results["distance_cpu_copy_gb_per_s_median"]
    results["distance_of_copy"] = results["distance_cpu_interleaved_of_copy"]
    results["distance_of_read"] = results["distance_cpu_interleaved_of_read"]
    if options.rounds:
        results |= idle.summary(options.rounds)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    main()
