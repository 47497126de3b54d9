# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU: SGLang's torch-native one over a view of the key cache that rotates shifted
keys (without them its results bit for bit), and our ``reasoncache_cpu``, one call per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.backend import PagedBackend
from sglang_reasoncache.attention.paged import once_more
from sglang_reasoncache.attention.served import key_rotation
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.kernels.rotation import KeyRotation

if TYPE_CHECKING:
    from sglang_reasoncache.compat.types import ForwardBatch, ModelRunner


class _RotatingKeys:
    """``k_cache`` as SGLang indexes it: ``k_cache[row_slots]`` in row order from position 0."""

    def __init__(self, keys: torch.Tensor, cached: CachedPositions, rotation: KeyRotation) -> None:
        self._keys, self._cached, self._rotation = keys, cached, rotation

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        keys = self._keys[slots]
        shift = self._cached.shift(slots, torch.arange(slots.shape[0], device=slots.device))
        shifted = shift.nonzero().squeeze(1)
        if shifted.numel():
            keys[shifted] = self._rotation.rotate(keys[shifted], shift[shifted]).to(keys.dtype)
        return keys


class CorrectedTorchNativeBackend(compat.TorchNativeAttnBackend):
    """``--attention-backend torch_native`` with corrected positions.

    Raises ValueError without a rotary embedding by which a key could be rotated.
    """

    def __init__(self, model_runner: ModelRunner, cached: CachedPositions) -> None:
        super().__init__(model_runner)
        self.allocator = model_runner.token_to_kv_pool_allocator
        self._cached = cached
        context = model_runner.model_config.context_len
        self.rotation = key_rotation(model_runner.model, context)

    @once_more
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.out_cache_loc is None or forward_batch.forward_mode.is_idle():
            return
        self._cached.record(forward_batch.out_cache_loc, forward_batch.positions)

    def _rotating(self, keys: torch.Tensor) -> Any:
        if not self.allocator.has_shifted_slots:
            return keys
        return _RotatingKeys(keys, self._cached, self.rotation)

    @once_more
    def _run_sdpa_forward_extend(
        self, query: Any, output: Any, k_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        keys = self._rotating(k_cache)
        return super()._run_sdpa_forward_extend(query, output, keys, *args, **kwargs)

    @once_more
    def _run_sdpa_forward_decode(
        self, query: Any, output: Any, k_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        window = kwargs.get("sliding_window_size")
        if self.allocator.has_shifted_slots and window is not None and window > -1:
            raise RuntimeError("sliding-window layers are refused at start-up")
        keys = self._rotating(k_cache)
        return super()._run_sdpa_forward_decode(query, output, keys, *args, **kwargs)


class PagedCpuBackend(PagedBackend, compat.TorchNativeAttnBackend):
    """Attention of the CPU platform by this project's kernels; see ``PagedBackend``."""

    always_ours = True

    def __init__(self, model_runner: ModelRunner, cached: CachedPositions | None = None) -> None:
        flag = f"--attention-backend {compat.CPU_BACKEND}"
        super().__init__(model_runner, cached, requested_by=flag)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the rows; every layer of this forward reads them."""
        paged, mode = self.paged, forward_batch.forward_mode
        paged.forget()
        if forward_batch.out_cache_loc is None or mode.is_idle():
            return
        paged.record(forward_batch)
        if mode.is_decode():
            paged.begin_decode(forward_batch)
        else:
            paged.begin_extend(forward_batch)
