# SPDX-License-Identifier: Apache-2.0
"""Times decode attention on the CPU: our backend and SGLang's torch-native backend, called as in a server."""

import functools
import math
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context

from eval.bench.attention_batch import RUN, Batch, Shape
from eval.bench.turns import Side, spread
from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import shared_allocator_of
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.cpu.backend import PagedCpuBackend


def outside_a_server() -> AbstractContextManager[object]:
    """A context in which SGLang's backends find the server arguments that they ask for."""
    args = {"device": "cpu", "attention_backend": "torch_native"}
    return get_context().override_server_args(**args)


class CpuBatch(Batch):
    """Decode steps of our backend and of SGLang's. A step plans which slots to read, then runs all layers."""

    # Our backend rounds its result to bf16.
    tolerance = 0.02

    def __init__(self, shape: Shape) -> None:
        # Enough layers for 1 GB of KV, to exceed the CPU's caches, but at most 8. Latent KV is slow, so only 2.
        self.num_layers = 2 if shape.rotated else min(8, math.ceil(1e9 / shape.layer_bytes))
        size: Any = dict(head_num=shape.kv_heads, head_dim=shape.head_dim)
        if shape.rotated:
            size = dict(kv_lora_rank=shape.head_dim, qk_rope_head_dim=shape.rotated)
        kind = compat.MLATokenToKVPool if shape.rotated else compat.MHATokenToKVPool
        size |= dict(layer_num=self.num_layers, device="cpu", enable_memory_saver=False)
        pool = kind(shape.slots - 1, 1, torch.bfloat16, **size)
        for side in (pool.kv_buffer,) if shape.rotated else (pool.k_buffer, pool.v_buffer):
            side[0].uniform_(-1, 1)
            for buffer in side[1:]:
                buffer.copy_(side[0])
        super().__init__(shape, compat.kv_of(pool, 0))
        # The table has two rows for each request: first all with shared blocks, then all without.
        self._table = ReqToTokenPool(2 * shape.requests, shape.tokens, "cpu", False)
        cached = CachedPositions(shape.slots, "cpu")
        cached.positions.copy_(self.cached_at)
        stock = compat.TokenToKVPoolAllocator(
            shape.slots - 1, torch.bfloat16, "cpu", pool, need_sort=False
        )
        self._allocator = shared_allocator_of(stock)
        heads = shape.heads, shape.query_dim, self.scale, shape.kv_heads
        self._layers = [
            compat.RadixAttention(*heads, layer_id=layer, v_head_dim=shape.head_dim)
            for layer in range(self.num_layers)
        ]
        dim = self.rotation.rotary_dim
        neox = self.rotation.is_neox
        rope = get_rope(dim, dim, shape.tokens, 10_000, neox, None, torch.bfloat16)
        # The attributes of SGLang's runner that the backends read.
        runner: Any = SimpleNamespace(
            device="cpu",
            dtype=torch.bfloat16,
            req_to_token_pool=self._table,
            token_to_kv_pool=pool,
            token_to_kv_pool_allocator=self._allocator,
            model=torch.nn.ModuleList([rope, *self._layers]),
            model_config=SimpleNamespace(context_len=shape.tokens, is_encoder_decoder=False),
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            use_mla_backend=bool(shape.rotated),
        )
        self._native = compat.TorchNativeAttnBackend(runner)
        self._ours = PagedCpuBackend(runner, cached)
        self._batch = self._batch_of(1)
        self._once = functools.cache(self._alone)

    def _batch_of(self, first_row: int) -> Any:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=self.shape.requests,
            input_ids=torch.zeros(self.shape.requests, dtype=torch.int64),
            req_pool_indices=first_row + self.requests,
            seq_lens=self.lengths,
            out_cache_loc=self.own_rows[:, -1].long(),
            seq_lens_sum=self.shape.requests * self.shape.tokens,
            positions=self.lengths - 1,
        )

    def share(self, percent: int, run: int = RUN) -> None:
        super().share(percent, run)
        # Row 0 of SGLang's table is padding.
        both = torch.cat((self.rows, self.own_rows))
        self._table.req_to_token[1 : 1 + len(both), : self.shape.tokens] = both
        self._allocator.has_shifted_slots = self.shares
        self._ours.init_forward_metadata(self._batch)
        output = self._forward(self._ours, self._layers[-1], self._batch)
        size = self.shape.requests, self.shape.heads, self.shape.head_dim
        self.check(f"{percent}% shared, ours", output.view(size), self.rows)

    def sides(self) -> dict[str, Side]:
        ours = functools.partial(self._step, self._ours)
        # This side reads the same number of positions of the same pool, none of them shared.
        unshared = functools.partial(ours, self._batch_of(1 + self.shape.requests))
        native = functools.partial(self._step, self._native)
        if self.shape.rotated:
            return {
                "ours": ours,
                "unshared": unshared,
                "absorbed": self._absorbed,
                "native": self._once,
            }
        return {"ours": ours, "unshared": unshared, "native": native}

    def row(self, samples: pd.DataFrame) -> dict[str, Any]:
        """Returns the figures of a setting. ``gb_per_s`` counts each position's K and V, shared or not.
        ``speedup`` and ``of_unshared`` compare steps of one round. SGLang's side rotates no shared keys."""
        steps = samples.pivot(index="round", columns="side", values="step_ms")
        ours, native = (samples[samples["side"] == side] for side in ("ours", "native"))
        decode = spread(ours["layer_ms"])
        rate = self.shape.layer_bytes / decode["median"] / 1e6
        absorbed: dict[str, Any] = {}
        if self.shape.rotated:
            absorbed = {"speedup_of_absorbed": spread(steps["absorbed"] / steps["ours"])}
        return {
            **absorbed,
            "layers": self.num_layers,
            "plan_us": spread(ours["plan_us"]),
            "plan_of_step": float((ours["plan_us"] / ours["step_ms"]).median()) / 1e3,
            "decode_ms": decode,
            "native_ms": spread(native["layer_ms"]),
            "speedup": spread(steps["native"] / steps["ours"]),
            "of_unshared": spread(steps["ours"] / steps["unshared"]),
            "gb_per_s": rate,
            "of_read": rate / float(samples["read"].median()),
        }

    def _step(self, backend: Any, batch: Any = None) -> list[dict[str, float]]:
        batch = self._batch if batch is None else batch
        start = time.perf_counter()
        backend.init_forward_metadata(batch)
        planned = time.perf_counter()
        for layer in self._layers:
            self._forward(backend, layer, batch)
        end = time.perf_counter()
        layer_ms = (end - planned) / self.num_layers * 1e3
        plan_us = (planned - start) * 1e6
        step_ms = (end - start) * 1e3
        return [{"plan_us": plan_us, "layer_ms": layer_ms, "step_ms": step_ms}]

    def _absorbed(self) -> list[dict[str, float]]:
        """Time PyTorch's attention over latent KV, request by request. All query heads read the one KV head."""
        start = time.perf_counter()
        for layer in range(self.num_layers):
            rows = self._native.token_to_kv_pool.get_key_buffer(layer)
            for query, slots in zip(self.query, self.rows.long(), strict=True):
                key = rows[slots, 0]
                value = key[:, : self.shape.head_dim]
                F.scaled_dot_product_attention(query, key, value, scale=self.scale)
        return [{"step_ms": (time.perf_counter() - start) * 1e3}]

    def _alone(self) -> list[dict[str, float]]:
        """Time one layer of one request in SGLang's backend, after a warm-up; multiply the time by the numbers
        of layers and requests. A whole step would be slow, as the backend copies latent KV for each head."""
        alone = self._batch_of(1)
        alone.req_pool_indices = alone.req_pool_indices[:1]
        alone.seq_lens = alone.seq_lens[:1]
        for _ in range(2):
            start = time.perf_counter()
            query = self.query[:1].flatten(1)
            layer = self._layers[0]
            self._native.forward_decode(query, None, None, layer, alone, save_kv_cache=False)
        layer_ms = (time.perf_counter() - start) * 1e3 * self.shape.requests
        return [{"layer_ms": layer_ms, "step_ms": layer_ms * self.num_layers}]

    def _forward(self, backend: Any, layer: Any, batch: Any) -> Any:
        query = self.query.flatten(1)
        return backend.forward_decode(query, None, None, layer, batch, save_kv_cache=False)
