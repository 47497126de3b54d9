# SPDX-License-Identifier: Apache-2.0
"""SGLang attention backend ``reasoncache_cpu``: a whole batch in one call per layer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_reasoncache import compat
from sglang_reasoncache.attention.backend import PagedBackend
from sglang_reasoncache.cache.cached_positions import CachedPositions

if TYPE_CHECKING:
    from sglang_reasoncache.compat.types import ForwardBatch, ModelRunner

logger = logging.getLogger(__name__)


class PagedCpuBackend(PagedBackend, compat.TorchNativeAttnBackend):
    """Attention of the CPU platform by this project's kernels; see ``PagedBackend``."""

    always_ours = True

    def __init__(self, model_runner: ModelRunner, cached: CachedPositions | None = None) -> None:
        flag = f"--attention-backend {compat.CPU_BACKEND}"
        super().__init__(model_runner, cached, requested_by=flag)
        if self.paged.backend != "native":
            logger.warning(
                "reasoncache: %s runs in PyTorch here, slower than torch_native: no C++ compiler "
                "was found",
                flag,
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
