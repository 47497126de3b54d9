# SPDX-License-Identifier: Apache-2.0
"""The attention backend of this project's CPU platform, ``reasoncache_cpu``."""

from sglang_reasoncache import compat
from sglang_reasoncache.attention.backend import PagedBackend
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat.types import ForwardBatch, ModelRunner


class PagedCpuBackend(PagedBackend, compat.TorchNativeAttnBackend):
    """Runs attention on the CPU, always with this project's kernels; see ``PagedBackend``."""

    always_ours = True

    def __init__(self, model_runner: ModelRunner, cached: CachedPositions | None = None) -> None:
        flag = f"--attention-backend {compat.CPU_BACKEND}"
        super().__init__(model_runner, cached, requested_by=flag)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a forward before its layers run."""
        paged = self.paged
        mode = forward_batch.forward_mode
        paged.forget()
        if forward_batch.out_cache_loc is None or mode.is_idle():
            return
        paged.record(forward_batch)
        paged.begin_selection(forward_batch)
        if mode.is_decode() or mode.is_target_verify():
            paged.begin_decode(forward_batch)
        else:
            paged.begin_extend(forward_batch)
