# SPDX-License-Identifier: Apache-2.0
"""SGLang's pool, rows and backends on the CPU, without a server around them."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import torch

from eval.bench.attention_rows import Shape, cached_positions, lay_rows
from sglang_reasoncache import compat
from sglang_reasoncache.cache.cached_positions import CachedPositions

#: What the layers of a pool take together, if so many fit into `_MOST_LAYERS`: above the caches.
_GIGABYTES = 1.0
_MOST_LAYERS = 8
_SEED = 5
#: Largest difference from attention over physically rotated keys, relative to its norm:
#: both round to bf16, torch's also inside.
_TOLERANCE = 0.02


class Step:
    """Decode steps of one batch on one pool, by either backend.

    Args:
        shape: Of the batch and the pool.

    Attributes:
        layers: Of the pool, all of which a step reads.
    """

    def __init__(self, shape: Shape) -> None:
        from sglang.srt.layers.rotary_embedding.factory import get_rope

        from sglang_reasoncache.attention.paged_cpu import PagedCpuBackend
        from sglang_reasoncache.attention.torch_native import CorrectedTorchNativeBackend

        torch.manual_seed(_SEED)
        self.shape = shape
        self.layers = min(_MOST_LAYERS, math.ceil(_GIGABYTES * 1e9 / shape.layer_bytes))
        pool = compat.MHATokenToKVPool(
            size=shape.slots - 1,
            page_size=1,
            dtype=torch.bfloat16,
            head_num=shape.kv_heads,
            head_dim=shape.head_dim,
            layer_num=self.layers,
            device="cpu",
            enable_memory_saver=False,
        )
        for side in (pool.k_buffer, pool.v_buffer):
            side[0].uniform_(-1, 1)
            for buffer in side[1:]:
                buffer.copy_(side[0])
        self._rows = compat.ReqToTokenPool(shape.requests, shape.tokens, "cpu", False)
        cached_at = CachedPositions(shape.slots, "cpu")
        cached_at.record(torch.arange(shape.slots), cached_positions(shape))
        self._allocator = SimpleNamespace(has_shifted_slots=False, has_evicted=False)
        scale = shape.head_dim**-0.5
        self._layers = [
            compat.RadixAttention(
                shape.heads, shape.head_dim, scale, shape.kv_heads, layer_id=layer
            )
            for layer in range(self.layers)
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
        self.native = compat.TorchNativeAttnBackend(runner)
        self.ours = PagedCpuBackend(runner, cached_at)
        self._reference = CorrectedTorchNativeBackend(runner, cached_at)
        self._query = torch.randn(shape.requests, shape.heads * dim).to(torch.bfloat16)
        self._batch: Any = None

    def share(self, percent: int) -> None:
        """Lay the rows anew, so much of each in blocks at the slots of earlier blocks.

        Raises:
            RuntimeError: our attention differs from that over rotated copies of the keys.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        shape = self.shape
        requests = torch.arange(1, shape.requests + 1)
        rows = lay_rows(shape, percent)
        self._rows.req_to_token[requests, : shape.tokens] = rows
        self._allocator.has_shifted_slots = percent > 0
        self._batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=shape.requests,
            input_ids=torch.zeros(shape.requests, dtype=torch.int64),
            req_pool_indices=requests,
            seq_lens=torch.full((shape.requests,), shape.tokens),
            out_cache_loc=rows[:, -1].long(),
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
