# SPDX-License-Identifier: Apache-2.0
"""Decode attention on the CPU: our backend and SGLang's torch-native on SGLang's own pool.

Both are called as SGLang calls them, without a server around them.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, ClassVar

import pandas as pd
import torch
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context

from eval.bench.attention_cases import Shape
from eval.bench.attention_rig import Rig, Row
from eval.bench.turns import Side, by_round, spread
from sglang_reasoncache import compat
from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
from sglang_reasoncache.cache.cached_positions import CachedPositions

#: What the layers of a pool take together, if so many fit into `_MOST_LAYERS`: above the caches.
_GIGABYTES = 1.0
_MOST_LAYERS = 8


class CpuRig(Rig):
    """Decode steps, each the plan and all layers of a pool, by either backend."""

    device_type = "cpu"
    columns: ClassVar = {
        "shape": ("requests x tokens - heads/KV heads x dim", 0),
        "layers": ("layers", 0),
        "shared_percent": ("shared, %", 0),
        "plan_us": ("plan, us", 0),
        "decode_ms": ("ours, ms a layer", 3),
        "native_ms": ("torch-native, ms a layer", 3),
        "native_threads": ("its threads", 0),
        "speedup": ("speed-up of a step", 2),
        "gb_per_s": ("GB/s", 1),
        "of_read": ("of read bandwidth", 2),
        "read_gb_per_s": ("read, GB/s", 1),
    }
    times = ("decode_ms", "native_ms", "torch-native")
    # Read before every step: nothing of the pool is left in the caches.
    bandwidth = ("read", 1.0)
    warm_up_rounds = 1
    # Our result is rounded to bf16, and so are the weights inside.
    tolerance = 0.02

    def __init__(self, shape: Shape, device: str | None = None) -> None:
        self.num_layers = min(_MOST_LAYERS, math.ceil(_GIGABYTES * 1e9 / shape.layer_bytes))
        super().__init__(shape, device)
        self._table = compat.ReqToTokenPool(shape.requests, shape.tokens, "cpu", False)
        cached = CachedPositions(shape.slots, "cpu")
        cached.positions.copy_(self.cached_at)
        self._allocator = SimpleNamespace(has_shifted_slots=False)
        dim = shape.head_dim
        self._layers = [
            compat.RadixAttention(shape.heads, dim, self.scale, shape.kv_heads, layer_id=layer)
            for layer in range(self.num_layers)
        ]
        rope = get_rope(dim, dim, shape.tokens, 10_000, True, None, torch.bfloat16)
        # What the backends look at of SGLang's runner.
        runner: Any = SimpleNamespace(
            device="cpu",
            dtype=torch.bfloat16,
            req_to_token_pool=self._table,
            token_to_kv_pool=self._kv_pool,
            token_to_kv_pool_allocator=self._allocator,
            model=torch.nn.ModuleList([rope, *self._layers]),
            model_config=SimpleNamespace(context_len=shape.tokens, is_encoder_decoder=False),
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            use_mla_backend=False,
        )
        self._native = compat.TorchNativeAttnBackend(runner)
        self._ours = PagedCpuBackend(runner, cached)
        self._batch: Any = None

    @staticmethod
    def prepared() -> AbstractContextManager[object]:
        """SGLang's backends as outside of a server."""
        args = {"device": "cpu", "attention_backend": "torch_native"}
        return get_context().override_server_args(**args)

    def make_pool(self) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._kv_pool = compat.MHATokenToKVPool(
            size=self.shape.slots - 1,
            page_size=1,
            dtype=torch.bfloat16,
            head_num=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            layer_num=self.num_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        for side in (pool.k_buffer, pool.v_buffer):
            side[0].uniform_(-1, 1)
            for buffer in side[1:]:
                buffer.copy_(side[0])
        return pool.k_buffer[0], pool.v_buffer[0]

    def share(self, percent: int) -> None:
        super().share(percent)
        requests = 1 + self.requests  # SGLang's row 0 is padding
        self._table.req_to_token[requests, : self.shape.tokens] = self.rows
        self._allocator.has_shifted_slots = percent > 0
        self._batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=self.shape.requests,
            input_ids=torch.zeros(self.shape.requests, dtype=torch.int64),
            req_pool_indices=requests,
            seq_lens=self.lengths,
            out_cache_loc=self.rows[:, -1].long(),
            seq_lens_sum=self.shape.requests * self.shape.tokens,
            positions=self.lengths - 1,
        )
        self._ours.init_forward_metadata(self._batch)
        found = self._forward(self._ours, self._layers[-1])
        self.check(f"{percent}% shared, ours", found.view(self.query.shape), self.rows)

    def sides(self, curves_only: bool) -> dict[str, Side]:
        """SGLang's with one thread and with all.

        PyTorch's threads wait for each other at every small operator, which on a busy machine
        takes longer than the work.
        """
        threads = torch.get_num_threads()
        native = {
            f"native {count}": functools.partial(self._step, self._native, count)
            for count in sorted({1, threads})
        }
        return {"ours": functools.partial(self._step, self._ours, threads), **native}

    def row(self, samples: pd.DataFrame) -> Row:
        """Steps are the plan and all layers; GB/s counts every entry's K and V once.

        ``plan_us`` is what our backend does once for a step. SGLang's side is the faster of its
        thread counts and reads shared entries as cached. ``speedup`` is of the same round.
        """
        steps = by_round(samples, "step_ms")
        best = str(steps.drop(columns="ours").median().idxmin())
        ours, native = (samples[samples["side"] == side] for side in ("ours", best))
        decode = spread(ours["layer_ms"])
        rate = self.shape.layer_bytes / decode["median"] / 1e6
        return {
            "layers": self.num_layers,
            "plan_us": spread(ours["plan_us"]),
            "decode_ms": decode,
            "native_ms": spread(native["layer_ms"]),
            "native_threads": int(best.split()[1]),
            "speedup": spread(steps[best] / steps["ours"]),
            "gb_per_s": rate,
            "of_read": rate / float(samples["bandwidth"].median()),
        }

    def _step(self, backend: Any, threads: int) -> list[dict[str, float]]:
        everyone = torch.get_num_threads()
        torch.set_num_threads(threads)
        start = time.perf_counter()
        backend.init_forward_metadata(self._batch)
        planned = time.perf_counter()
        for layer in self._layers:
            self._forward(backend, layer)
        end = time.perf_counter()
        torch.set_num_threads(everyone)
        plan, layers = planned - start, end - planned
        figures = {"plan_us": plan * 1e6, "layer_ms": layers / self.num_layers * 1e3}
        return [{**figures, "step_ms": (plan + layers) * 1e3}]

    def _forward(self, backend: Any, layer: Any) -> Any:
        query = self.query.flatten(1)
        return backend.forward_decode(query, None, None, layer, self._batch, save_kv_cache=False)

    @staticmethod
    def key_figures(rows: Sequence[Row]) -> dict[str, float]:
        """At 32 requests x 1,000 tokens, nothing shared; the worse of the head shapes measured."""
        plain = [r for r in rows if r["shape"].startswith("32x1000-") and not r["shared_percent"]]
        if not plain:
            return {}
        return {
            "decode_speedup_vs_torch_native": min(row["speedup"]["median"] for row in plain),
            "decode_fraction_of_bandwidth": min(row["of_read"] for row in plain),
        }
