# SPDX-License-Identifier: Apache-2.0
"""SGLang attention backend ``reasoncache_cpu``: a whole batch in one call per layer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.paged import PagedAttention
from sglang_reasoncache.attention.supported import check_supported
from sglang_reasoncache.cache.cached_positions import CachedPositions

if TYPE_CHECKING:
    from sglang_reasoncache.compat.types import AttentionLayer, ForwardBatch, ModelRunner

logger = logging.getLogger(__name__)


class PagedCpuBackend(compat.TorchNativeAttnBackend):
    """Attention of the CPU platform by this project's kernels.

    Evicted positions are skipped (``skips_evicted``): their row entries are below 0.

    Args:
        model_runner: SGLang's runner, its pool already there.
        cached: Slots' cached positions: shared keys are used at the position where they are
            read. None reads every key as cached.

    Raises:
        ValueError: a model, pool or mode that is not supported, by name; or corrected
            positions that the model's rotary embedding does not allow.
    """

    skips_evicted = True

    def __init__(self, model_runner: ModelRunner, cached: CachedPositions | None = None) -> None:
        check_supported(model_runner, f"--attention-backend {compat.CPU_BACKEND}")
        super().__init__(model_runner)
        self.paged = PagedAttention(model_runner, cached)
        if self.paged.backend != "native":
            logger.warning(
                "reasoncache: --attention-backend %s runs in PyTorch here, slower than "
                "torch_native: no C++ compiler was found",
                compat.CPU_BACKEND,
            )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the rows; every layer of this forward reads them."""
        paged, mode = self.paged, forward_batch.forward_mode
        paged.forget()
        if forward_batch.out_cache_loc is None or mode.is_idle():
            return
        paged.record(forward_batch)
        new = None if mode.is_decode() else forward_batch.extend_seq_lens_cpu
        prefill = None
        if paged.statistics is not None:
            rows, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
            prefill = paged.statistics.begin(rows, lengths, new)
        if new is None:
            paged.begin_decode(forward_batch)
        else:
            paged.begin_extend(forward_batch, prefill)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``q`` ``[batch, heads * dim]``; returns ``[batch, heads * v_dim]``."""
        self.paged.write(k, v, layer, forward_batch, save_kv_cache)
        return self.paged.decode(q, layer, sinks)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``q`` ``[tokens, heads * dim]``; returns ``[tokens, heads * v_dim]``."""
        self.paged.write(k, v, layer, forward_batch, save_kv_cache)
        out = self.paged.extend(q, layer, forward_batch, sinks)
        self.paged.weigh(q, layer, sinks)
        return out
