# SPDX-License-Identifier: Apache-2.0
"""SGLang's torch-native attention, reading shared slots in their right position.

Writes, prefill and every batch without a shifted slot take the stock code path,
so such a batch gives stock results bit for bit. With a shifted slot in the batch,
decode gathers all rows at once and rotates only the moved keys; extend lets the
stock loop read through a view of the key cache that rotates what it hands out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sglang_reasoncache import compat
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.kernels.rotation import Angles, KeyRotation


class _DecodePlan(NamedTuple):
    """One decode batch with at least one shifted slot; built once, used by every layer."""

    slots: torch.Tensor  # int64 [batch * width], slot of each entry, 0 where padded
    width: int  # longest sequence of the batch, tokens
    mask: torch.Tensor  # additive [batch, 1, 1, width], 0 or -inf, in the model's dtype
    shifted: torch.Tensor  # int64 [num_shifted], entries whose key is rotated
    angles: Angles  # [num_shifted, rotary_dim / 2]


class _RotatingKeys:
    """``k_cache`` as the stock loop indexes it: ``k_cache[row_slots]`` in row order from position 0."""

    def __init__(
        self, keys: torch.Tensor, cached_at: CachedPositions, rotation: KeyRotation
    ) -> None:
        self._keys, self._cached_at, self._rotation = keys, cached_at, rotation

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        keys = self._keys[slots]
        shift = self._cached_at.shift(slots, torch.arange(slots.shape[0], device=slots.device))
        shifted = shift.nonzero().squeeze(1)
        if shifted.numel():
            rotated = self._rotation.rotate(keys[shifted], self._rotation.angles(shift[shifted]))
            keys[shifted] = rotated.to(keys.dtype)
        return keys


class CorrectedTorchNativeBackend(compat.TorchNativeAttnBackend):
    """Position-corrected reads on the CPU platform.

    Args:
        model_runner: SGLang's runner.
        cached: Slots' cached positions.
    """

    def __init__(self, model_runner: Any, cached: CachedPositions) -> None:
        super().__init__(model_runner)
        self._allocator = model_runner.token_to_kv_pool_allocator
        self.cached_at = cached
        self._dtype = model_runner.dtype
        self.rotation = KeyRotation.from_model(
            model_runner.model, model_runner.model_config.context_len
        )
        self._plan: _DecodePlan | None = None
        self._extend_shifted = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan, self._extend_shifted = None, False
        if forward_batch.out_cache_loc is None or forward_batch.forward_mode.is_idle():
            return
        self.cached_at.record(forward_batch.out_cache_loc, forward_batch.positions)
        if not self._allocator.has_shifted_slots:
            return
        slots, shift, valid = self._rows(forward_batch)
        shifted = shift.flatten().nonzero().squeeze(1)
        if not shifted.numel():
            return
        if not forward_batch.forward_mode.is_decode():
            self._extend_shifted = True
            return
        mask = torch.zeros(valid.shape, dtype=self._dtype, device=valid.device)
        mask.masked_fill_(~valid, float("-inf"))
        self._plan = _DecodePlan(
            slots=slots.flatten(),
            width=slots.shape[1],
            mask=mask[:, None, None, :],
            shifted=shifted,
            angles=self.rotation.angles(shift.flatten()[shifted]),
        )

    def _rows(self, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots, shifts and validity, each ``[batch, longest sequence]``."""
        lengths = forward_batch.seq_lens
        width = int(lengths.max())
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long(), :width]
        at = torch.arange(width, device=rows.device)
        valid = at[None, :] < lengths[:, None]
        # What lies beyond a row's end belongs to nobody; slot 0 is SGLang's padding.
        slots = torch.where(valid, rows, 0).long()
        shift = torch.where(valid, self.cached_at.shift(slots, at[None, :]), 0)
        return slots, shift, valid

    def _run_sdpa_forward_extend(
        self, query: Any, output: Any, k_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._extend_shifted:
            k_cache = _RotatingKeys(k_cache, self.cached_at, self.rotation)
        return super()._run_sdpa_forward_extend(query, output, k_cache, *args, **kwargs)

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *args: Any,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Same contract as the stock method: ``query``, ``output`` ``[batch, heads, head_dim]``."""
        plan = self._plan
        if plan is None:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                *args,
                scaling=scaling,
                sliding_window_size=sliding_window_size,
                **kwargs,
            )
        if sliding_window_size is not None and sliding_window_size > -1:
            raise RuntimeError("sliding-window layers are refused at start-up")  # owner: seam check
        batch, heads, _ = query.shape
        kv_heads = k_cache.shape[1]
        keys = k_cache.index_select(0, plan.slots)
        rotated = self.rotation.rotate(keys.index_select(0, plan.shifted), plan.angles)
        # Not index_copy_, which fp8 does not have.
        keys[plan.shifted] = rotated.to(keys.dtype)
        values = v_cache.index_select(0, plan.slots)
        keys = keys.view(batch, plan.width, kv_heads, -1).transpose(1, 2).to(query.dtype)
        values = values.view(batch, plan.width, kv_heads, -1).transpose(1, 2).to(query.dtype)
        # The query heads of one KV head ride on the query-length axis: grouped
        # attention without repeating K and V.
        grouped = query.reshape(batch, kv_heads, heads // kv_heads, -1)
        mask = plan.mask.expand(batch, kv_heads, heads // kv_heads, plan.width)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        output.copy_(out.reshape(batch, heads, -1))
        return output
