# SPDX-License-Identifier: Apache-2.0
"""SGLang's torch-native attention over a view of the key cache that rotates shifted keys.

Without shifted slots the results are SGLang's bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat
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
        self._allocator = model_runner.token_to_kv_pool_allocator
        self._cached = cached
        context = model_runner.model_config.context_len
        self.rotation = KeyRotation.from_model(model_runner.model, context)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.out_cache_loc is None or forward_batch.forward_mode.is_idle():
            return
        self._cached.record(forward_batch.out_cache_loc, forward_batch.positions)

    def _rotating(self, keys: torch.Tensor) -> Any:
        if not self._allocator.has_shifted_slots:
            return keys
        return _RotatingKeys(keys, self._cached, self.rotation)

    def _run_sdpa_forward_extend(
        self, query: Any, output: Any, k_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        keys = self._rotating(k_cache)
        return super()._run_sdpa_forward_extend(query, output, keys, *args, **kwargs)

    def _run_sdpa_forward_decode(
        self, query: Any, output: Any, k_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        window = kwargs.get("sliding_window_size")
        if self._allocator.has_shifted_slots and window is not None and window > -1:
            raise RuntimeError("sliding-window layers are refused at start-up")
        keys = self._rotating(k_cache)
        return super()._run_sdpa_forward_decode(query, output, keys, *args, **kwargs)
