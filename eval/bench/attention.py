# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.bench.attention``: decode attention on the CPU, ours against SGLang's torch-native.

Both are called as SGLang calls them, on one pool of SGLang's, round by round in turn. The
memory bandwidth is measured in between, which empties the caches; slots lie as requests that
decode together get them. ``--server`` also compares two servers of the embedded model.
Prints a Markdown table, writes ``build/bench/kernels.json``.
"""

from __future__ import annotations

import argparse
import bisect
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from eval.bench.bandwidth import Yardstick
from eval.runs.client import Request, ask_all
from eval.runs.machine import describe_machine, describe_versions
from eval.serving import MODEL_NAME, ServerProcess
from eval.tiny_reasoner import CHECKPOINT
from eval.tiny_reasoner.task import generate
from sglang_reasoncache.cache.home import HomePositions
from sglang_reasoncache.platform import PLATFORM_NAME
from sglang_reasoncache.plugin import seams

#: Tokens of a shared block.
_BLOCK = 16
#: Of the arrays of the yardstick, which run before every step and leave nothing of the pool
#: in the caches, and about what a pool may take.
_GIGABYTES = 1.0
_MOST_LAYERS = 8
_SEED = 5
#: Largest difference from attention over physically rotated keys, relative to its norm:
#: both round to bf16, torch's also inside.
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Shape:
    """``requests`` of ``tokens`` each; a bf16 pool with K and V of ``[slots, kv_heads, head_dim]``."""

    requests: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.tokens}-{self.heads}/{self.kv_heads}x{self.head_dim}"

    @property
    def layer_bytes(self) -> int:
        """K and V of all entries in one layer."""
        return self.requests * self.tokens * 2 * self.kv_heads * self.head_dim * 2

    @property
    def layers(self) -> int:
        return min(_MOST_LAYERS, math.ceil(_GIGABYTES * 1e9 / self.layer_bytes))


#: Those of 32 requests are the ones the result is named after.
SHAPES = tuple(
    Shape(requests, tokens, *heads)
    for requests, tokens in ((32, 1000), (8, 16_000))
    for heads in ((4, 2, 64), (32, 8, 128))
)
SHARED = (0, 22, 50)


@dataclass(frozen=True)
class Spread:
    """Quartiles of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        # Within the values seen, however few.
        several = [*values] * 2 if len(values) == 1 else values
        low, middle, high = statistics.quantiles(several, n=4, method="inclusive")
        return cls(middle, low, high)

    def text(self, digits: int) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True)
class Row:
    """One setting. Steps are the plan and all layers; GB/s counts every entry's K and V once.

    Attributes:
        plan_us: What our backend does once for a step, home positions included.
        decode_ms: Our time of one layer.
        native_ms: SGLang's; it reads shared entries as cached.
        native_threads: With which it was faster, one or all. PyTorch's threads wait for each
            other at every small operator, which on a busy machine takes longer than the work.
        speedup: SGLang's step over ours, of the same round.
        read_gb_per_s: The machine's, in between.
    """

    shape: str
    layers: int
    shared_percent: int
    plan_us: Spread
    decode_ms: Spread
    native_ms: Spread
    native_threads: int
    speedup: Spread
    gb_per_s: float
    read_gb_per_s: Spread

    @property
    def of_read(self) -> float:
        return self.gb_per_s / self.read_gb_per_s.median


class Step:
    """Decode steps of one batch on one pool, by either backend.

    Args:
        shape: Of the batch and the pool.
    """

    def __init__(self, shape: Shape) -> None:
        from sglang.srt.layers.rotary_embedding.factory import get_rope

        from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
        from sglang_reasoncache.attention.torch_native import CorrectedTorchNativeBackend

        torch.manual_seed(_SEED)
        self.shape = shape
        slots = shape.requests * shape.tokens
        pool = seams.MHATokenToKVPool(
            size=slots,
            page_size=1,
            dtype=torch.bfloat16,
            head_num=shape.kv_heads,
            head_dim=shape.head_dim,
            layer_num=shape.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        for side in (pool.k_buffer, pool.v_buffer):
            side[0].uniform_(-1, 1)
            for buffer in side[1:]:
                buffer.copy_(side[0])
        self._rows = seams.ReqToTokenPool(shape.requests, shape.tokens, "cpu", False)
        self._home = HomePositions(slots + 1, "cpu")
        self._allocator = SimpleNamespace(home=self._home, has_moved_slots=False)
        scale = shape.head_dim**-0.5
        self._layers = [
            seams.RadixAttention(shape.heads, shape.head_dim, scale, shape.kv_heads, layer_id=layer)
            for layer in range(shape.layers)
        ]
        dim = shape.head_dim
        rope = get_rope(dim, dim, shape.tokens, 10_000, True, None, torch.bfloat16)
        # What the backends look at of SGLang's runner.
        runner = SimpleNamespace(
            device="cpu",
            dtype=torch.bfloat16,
            req_to_token_pool=self._rows,
            token_to_kv_pool=pool,
            token_to_kv_pool_allocator=self._allocator,
            model=torch.nn.ModuleList([rope, *self._layers]),
            model_config=SimpleNamespace(context_len=shape.tokens, is_encoder_decoder=False),
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            use_mla_backend=False,
        )
        self.native = seams.TorchNativeAttnBackend(runner)
        self.ours = PagedCpuBackend(runner, corrected=True)
        self._reference = CorrectedTorchNativeBackend(runner)
        self._query = torch.randn(shape.requests, shape.heads * dim).to(torch.bfloat16)
        self._batch: Any = None

    def share(self, percent: int) -> None:
        """Lay the rows anew, so much of each in blocks at the slots of earlier blocks.

        Token t of request r lies in slot ``1 + t * requests + r``, as decoding together
        leaves it; the slots that sharing frees stay empty.

        Raises:
            RuntimeError: our attention differs from that over rotated copies of the keys.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        shape, draw = self.shape, random.Random(_SEED)
        at = torch.arange(shape.tokens)
        for request in range(shape.requests):
            slots = 1 + request + at * shape.requests
            self._home.record(slots, at)
            for block, source in shared_blocks(shape.tokens, percent / 100, draw):
                slots[block * _BLOCK :][:_BLOCK] = slots[source * _BLOCK :][:_BLOCK]
            self._rows.req_to_token[request + 1] = slots.to(torch.int32)
        self._allocator.has_moved_slots = percent > 0
        requests = torch.arange(1, shape.requests + 1)
        self._batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=shape.requests,
            input_ids=torch.zeros(shape.requests, dtype=torch.int64),
            req_pool_indices=requests,
            seq_lens=torch.full((shape.requests,), shape.tokens),
            out_cache_loc=self._rows.req_to_token[requests, shape.tokens - 1].long(),
            seq_lens_sum=shape.requests * shape.tokens,
            positions=torch.full((shape.requests,), shape.tokens - 1),
        )
        for backend in (self.ours, self._reference):
            backend.init_forward_metadata(self._batch)
        found = self._forward(self.ours, self._layers[-1]).double()
        expected = self._forward(self._reference, self._layers[-1]).double()
        error = float((found - expected).norm() / expected.norm())
        if not error <= _TOLERANCE:
            raise RuntimeError(f"{shape}, {percent}% shared: relative error {error:.3g}")

    def seconds(self, backend: Any) -> tuple[float, float]:
        """What is done once for a step, and all layers."""
        start = time.perf_counter()
        backend.init_forward_metadata(self._batch)
        planned = time.perf_counter()
        for layer in self._layers:
            self._forward(backend, layer)
        return planned - start, time.perf_counter() - planned

    def _forward(self, backend: Any, layer: Any) -> torch.Tensor:
        found: torch.Tensor = backend.forward_decode(
            self._query, None, None, layer, self._batch, save_kv_cache=False
        )
        return found


def shared_blocks(tokens: int, fraction: float, draw: random.Random) -> list[tuple[int, int]]:
    """(block, earlier block of its own) pairs that cover ``fraction`` of the tokens.

    Neither the first block nor that of the newest token is shared.
    """
    blocks = range(1, (tokens - 1) // _BLOCK)
    chosen = set(draw.sample(blocks, round(fraction * tokens / _BLOCK)))
    kept = [block for block in (0, *blocks) if block not in chosen]
    return [
        (block, kept[draw.randrange(bisect.bisect_left(kept, block))]) for block in sorted(chosen)
    ]


def measure(step: Step, percent: int, rounds: int, yardstick: Yardstick) -> Row:
    """Steps of both backends in turn, SGLang's with one thread and with all; one round warms up."""
    step.share(percent)
    threads = torch.get_num_threads()
    sides = [(step.ours, threads), *((step.native, count) for count in sorted({1, threads}))]
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    reads: list[float] = []
    try:
        for number in range(rounds + 1):
            order = list(enumerate(sides))
            for index, (backend, count) in order if number % 2 else order[::-1]:
                torch.set_num_threads(count)
                took = step.seconds(backend)
                torch.set_num_threads(threads)
                read = yardstick.read()
                if number:
                    times[index].append(took)
                    reads.append(read)
    finally:
        torch.set_num_threads(threads)
    layers, ours = step.shape.layers, times[0]
    decode = Spread.of([decode / layers * 1e3 for _, decode in ours])
    best = min(range(1, len(sides)), key=lambda i: statistics.median(map(sum, times[i])))
    return Row(
        shape=str(step.shape),
        layers=layers,
        shared_percent=percent,
        plan_us=Spread.of([plan * 1e6 for plan, _ in ours]),
        decode_ms=decode,
        native_ms=Spread.of([native / layers * 1e3 for _, native in times[best]]),
        native_threads=sides[best][1],
        speedup=Spread.of([sum(b) / sum(a) for a, b in zip(ours, times[best], strict=True)]),
        gb_per_s=step.shape.layer_bytes / decode.median / 1e6,
        read_gb_per_s=Spread.of(reads),
    )


def measure_all(shapes: Sequence[Shape], shared: Sequence[int], rounds: int) -> list[Row]:
    """Every shape with every share of shared entries, printed row by row as a Markdown table."""
    from sglang.srt.runtime_context import get_context

    print(
        "\n| requests x tokens - heads/KV heads x dim | layers | shared | plan, us | ours, ms a layer "
        "| torch-native, ms a layer | its threads | speed-up of a step | GB/s | of read bandwidth |"
    )
    print("|" + " --- |" * 10)
    rows = []
    yardstick = Yardstick(torch.device("cpu"), _GIGABYTES)
    with (
        get_context().override_server_args(device="cpu", attention_backend="torch_native"),
        torch.inference_mode(),
    ):
        for shape in shapes:
            step = Step(shape)
            for percent in shared:
                row = measure(step, percent, rounds, yardstick)
                rows.append(row)
                print(
                    f"| {row.shape} | {row.layers} | {row.shared_percent}% | {row.plan_us.text(0)} "
                    f"| {row.decode_ms.text(3)} | {row.native_ms.text(3)} | {row.native_threads} "
                    f"| {row.speedup.text(2)} | {row.gb_per_s:.1f} "
                    f"| {row.of_read:.2f} of {row.read_gb_per_s.text(1)} |",
                    flush=True,
                )
    return rows


def key_figures(rows: Sequence[Row]) -> dict[str, Any]:
    """At 32 requests x 1,000 tokens, nothing shared; the worse of the head shapes measured."""
    plain = [row for row in rows if row.shape.startswith("32x1000-") and not row.shared_percent]
    if not plain:
        return {}
    return {
        "decode_speedup_vs_torch_native": min(row.speedup.median for row in plain),
        "decode_fraction_of_bandwidth": min(row.of_read for row in plain),
    }


def serve(rounds: int, logs: Path, requests: int = 32, max_tokens: int = 512) -> dict[str, Any]:
    """Output tokens/s of two stock servers that differ in the attention backend alone, in turn.

    Raises:
        RuntimeError: a request failed.
    """
    speeds: dict[str, list[float]] = {"torch_native": [], seams.CPU_BACKEND: []}
    servers = {
        name: ServerProcess(
            CHECKPOINT,
            flags=["--max-total-tokens", "40000", "--attention-backend", name],
            log_path=logs / f"attention_{name}.log",
        )
        for name in speeds
    }
    body = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens}
    with servers["torch_native"], servers[seams.CPU_BACKEND]:
        for number in range(rounds + 1):
            asked = [
                Request(str(index), problem.prompt, body)
                for index, problem in enumerate(generate(_SEED + number, requests))
            ]
            for name in list(speeds)[:: 1 if number % 2 else -1]:
                answers = ask_all(servers[name].url, MODEL_NAME, asked)
                failed = [answer.error for answer in answers if answer.error]
                if failed:
                    raise RuntimeError(f"{name}: {len(failed)} requests failed, first: {failed[0]}")
                seconds = max(a.ended for a in answers) - min(a.started for a in answers)
                if number:  # the first round warms up
                    speeds[name].append(sum(a.output_tokens for a in answers) / seconds)
    ratios = Spread.of([b / a for a, b in zip(*speeds.values(), strict=True)])
    medians = [statistics.median(values) for values in speeds.values()]
    print(f"\n{rounds} rounds of {requests} requests x {max_tokens} tokens, embedded model\n")
    print(f"| | {' | '.join(speeds)} | ratio |\n| --- | --- | --- | --- |")
    print(f"| output tokens/s | {medians[0]:.0f} | {medians[1]:.0f} | {ratios.text(2)} |")
    return {"server_tokens_per_s_ratio": ratios.median, "server_tokens_per_s": speeds}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.bench.attention", description=__doc__.splitlines()[0]
    )
    known = {str(shape): shape for shape in SHAPES}
    parser.add_argument(
        "--shapes", default=",".join(known), help="Default: all; none: only the servers."
    )
    parser.add_argument("--shared", default="0,22,50", help="Percent of entries (default 0,22,50).")
    parser.add_argument("--rounds", type=int, default=9, help="Rounds a setting (default 9).")
    parser.add_argument("--threads", type=int, help="All of them (default: as PyTorch has).")
    parser.add_argument("--server", action="store_true", help="Also compare two servers.")
    parser.add_argument("--server-rounds", type=int, default=5, help="Default 5.")
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
    for name in ("rounds", "server_rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    # Before SGLang is imported: the platform our backend serves on.
    os.environ |= {"SGLANG_PLATFORM": PLATFORM_NAME, "CUDA_VISIBLE_DEVICES": ""}
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows = measure_all(options.shapes, options.shared, options.rounds) if options.shapes else []
    cpu: dict[str, Any] = key_figures(rows)
    if options.server:
        cpu |= serve(options.server_rounds, options.output.parent)
    cpu["rows"] = [{**asdict(row), "of_read": row.of_read} for row in rows]
    results = {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "cpu": cpu,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\nwrote {options.output}")


if __name__ == "__main__":
    main()
