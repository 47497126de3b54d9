# SPDX-License-Identifier: Apache-2.0
"""SGLang attention backend ``reasoncache_cpu``: a whole batch in one call per layer.

Rows are planned once per forward and read by every layer where they lie. With
``cached_at`` positions a shared key is used where it is read, without them as cached.
Writes and pool stay SGLang's own.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.supported import attention_layers, check_supported
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.eviction.policies.contract import Observation, Selector
from sglang_reasoncache.eviction.statistics import AttentionStatistics, Observed
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.extend import ExtendPlan, extend_attention
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan, plan_rows
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.selection.page_selection import PageSelection

logger = logging.getLogger(__name__)

#: ``--attention-backend`` name.
NAME = compat.CPU_BACKEND


class PagedCpuBackend(compat.TorchNativeAttnBackend):
    """Attention of the CPU platform by this project's kernels.

    Dropped positions are skipped (``skips_evicted``): their row entries are below 0.

    Args:
        model_runner: SGLang's runner, its pool already there.
        cached: Slots' cached positions: shared keys are used at the position where they are
            read. None reads every key as cached.

    Raises:
        ValueError: a model, pool or mode that cannot be served, by name; or corrected
            positions that the model's rotary embedding does not allow.
    """

    skips_evicted = True

    def __init__(self, model_runner: Any, cached: CachedPositions | None = None) -> None:
        check_supported(model_runner, f"--attention-backend {NAME}")
        super().__init__(model_runner)
        self._allocator = model_runner.token_to_kv_pool_allocator
        self._dtype = model_runner.dtype
        self.cached_at = cached
        self.rotation: KeyRotation | None = None
        if cached is not None:
            self.rotation = KeyRotation.from_model(
                model_runner.model, model_runner.model_config.context_len
            )
        pool = self.token_to_kv_pool
        self._layers = {
            layer: PagedKv(pool.get_key_buffer(layer), pool.get_value_buffer(layer), self.rotation)
            for layer in range(pool.start_layer, pool.start_layer + pool.layer_num)
        }
        self._num_slots = self._layers[pool.start_layer].num_slots
        # Soft-capped logits are beyond PyTorch's fused attention.
        self._singly = any(layer.logit_cap > 0 for layer in attention_layers(model_runner.model))
        self._decode_plan: RowPlan | None = None
        self._extend_plan: ExtendPlan | None = None
        self._statistics: AttentionStatistics | None = None
        self._observed: Observed | None = None
        self._selection: PageSelection | None = None
        if self._layers[pool.start_layer].backend != "native":
            logger.warning(
                "reasoncache: --attention-backend %s runs in PyTorch here, slower than "
                "torch_native: no C++ compiler was found",
                NAME,
            )

    def observe(self, wanted: Observation) -> AttentionStatistics:
        """Note from now on how much weight positions get; the same object in every call."""
        if self._statistics is None:
            pool = self.req_to_token_pool
            self._statistics = AttentionStatistics(pool.req_to_token, pool.req_generation, wanted)
        return self._statistics

    def select(self, name: str, selector: Selector) -> PageSelection:
        """Have decode steps read what ``selector`` keeps, from now on."""
        keys = {layer: kv.keys for layer, kv in self._layers.items()}
        page = self._allocator.page_size
        self._selection = PageSelection(name, selector, keys, page, self.rotation)
        return self._selection

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the rows; every layer of this forward reads them."""
        self._decode_plan = self._extend_plan = self._observed = None
        mode = forward_batch.forward_mode
        if forward_batch.out_cache_loc is None or mode.is_idle():
            return
        cached_at = None
        if self.cached_at is not None:
            self.cached_at.record(forward_batch.out_cache_loc, forward_batch.positions)
            if self._allocator.has_shifted_slots:
                cached_at = self.cached_at.positions
        plan = plan_rows(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            cached_at,
            num_slots=self._num_slots,
        )
        new = None if mode.is_decode() else forward_batch.extend_seq_lens.tolist()
        if self._selection is not None:
            self._selection.begin(
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                forward_batch.seq_lens if new is None else forward_batch.seq_lens[:0],
                cached_at,
            )
        if new is None:
            self._decode_plan = plan
        else:
            self._extend_plan = ExtendPlan(plan, new, self._dtype, singly=self._singly)
        if self._statistics is not None:
            self._observed = self._statistics.observe(
                plan, forward_batch.req_pool_indices, forward_batch.seq_lens, new
            )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``q`` ``[batch, heads * dim]``; returns ``[batch, heads * v_dim]``."""
        self._write(k, v, layer, forward_batch, save_kv_cache)
        plan = self._decode_plan
        if plan is None:
            raise RuntimeError("forward_decode without a plan of its batch")
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        all_weights = weights = None if self._observed is None else self._observed.weights
        some = None
        if self._selection is not None:
            some = self._selection.plan(layer.layer_id, query, layer.scaling)
        if some is not None:
            plan = some.rows
            weights = None if weights is None else torch.zeros(len(plan.kv_indices))
        out = decode_attention(
            query,
            self._layers[layer.layer_id],
            plan,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=None if sinks is None else sinks.float(),
            weights=weights,
        )
        if some is not None and all_weights is not None and weights is not None:
            all_weights[some.among] += weights
        return out.view(out.shape[0], -1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``q`` ``[tokens, heads * dim]``; returns ``[tokens, heads * v_dim]``."""
        self._write(k, v, layer, forward_batch, save_kv_cache)
        plan = self._extend_plan
        if plan is None:
            raise RuntimeError("forward_extend without a plan of its batch")
        if sinks is not None and not self._singly:
            self._singly = True
            plan = self._extend_plan = ExtendPlan(
                plan.rows, forward_batch.extend_seq_lens.tolist(), self._dtype, singly=True
            )
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        sinks = None if sinks is None else sinks.float()
        out = extend_attention(
            query,
            self._layers[layer.layer_id],
            plan,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
            sinks=sinks,
        )
        # PyTorch's fused attention tells no weights; these are a few queries of each prompt.
        parts = () if self._observed is None else self._observed.parts()
        for tokens, spans, weights in parts:
            decode_attention(
                query[tokens],
                self._layers[layer.layer_id],
                plan.rows,
                scale=layer.scaling,
                logit_cap=layer.logit_cap,
                sinks=sinks,
                spans=spans,
                weights=weights,
            )
        return out.view(out.shape[0], -1)

    def _write(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
    ) -> None:
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, compat.KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
            if self._selection is not None:
                decodes = self._decode_plan is not None
                self._selection.note(layer.layer_id, forward_batch.out_cache_loc, k, apart=decodes)
