# SPDX-License-Identifier: Apache-2.0
"""SGLang's torch-native attention, reading shared slots in their right position.

Writes, prefill and every batch without a moved slot take the stock code path,
so such a batch gives stock results bit for bit. With a moved slot in the batch,
decode gathers all rows at once and rotates only the moved keys; extend lets the
stock loop read through a view of the key cache that rotates what it hands out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sglang_reasoncache.attention.rotation import Angles, KeyRotation
from sglang_reasoncache.cache.home import HomePositions
from sglang_reasoncache.plugin import seams


class _DecodePlan(NamedTuple):
    """One decode batch with at least one moved slot; built once, used by every layer."""

    slots: torch.Tensor  # int64 [batch * width], slot of each entry, 0 where padded
    width: int  # longest sequence of the batch, tokens
    mask: torch.Tensor  # additive [batch, 1, 1, width], 0 or -inf, in the model's dtype
    moved: torch.Tensor  # int64 [num_moved], entries whose key is rotated
    angles: Angles  # [num_moved, rotary_dim / 2]


class _RotatingKeys:
    """``k_cache`` as the stock loop indexes it: ``k_cache[row_slots]`` in row order from position 0."""

    def __init__(self, keys: torch.Tensor, home: HomePositions, rotation: KeyRotation) -> None:
        self._keys, self._home, self._rotation = keys, home, rotation

    def __getitem__(self, slots: torch.Tensor) -> torch.Tensor:
        keys = self._keys[slots]
        shift = self._home.shift(slots, torch.arange(slots.shape[0], device=slots.device))
        moved = shift.nonzero().squeeze(1)
        if moved.numel():
            turned = self._rotation.rotate(keys[moved], self._rotation.angles(shift[moved]))
            keys[moved] = turned.to(keys.dtype)
        return keys


class CorrectedTorchNativeBackend(seams.TorchNativeAttnBackend):
    """Position-corrected reads on the CPU platform.

    Args:
        model_runner: SGLang's runner; its allocator carries ``home``.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._allocator = model_runner.token_to_kv_pool_allocator
        self.home: HomePositions = self._allocator.home
        self._dtype = model_runner.dtype
        self.rotation = KeyRotation.from_model(
            model_runner.model, model_runner.model_config.context_len
        )
        self._plan: _DecodePlan | None = None
        self._extend_moved = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan, self._extend_moved = None, False
        if forward_batch.out_cache_loc is None or forward_batch.forward_mode.is_idle():
            return
        self.home.record(forward_batch.out_cache_loc, forward_batch.positions)
        if not self._allocator.has_moved_slots:
            return
        slots, shift, valid = self._rows(forward_batch)
        moved = shift.flatten().nonzero().squeeze(1)
        if not moved.numel():
            return
        if not forward_batch.forward_mode.is_decode():
            self._extend_moved = True
            return
        mask = torch.zeros(valid.shape, dtype=self._dtype, device=valid.device)
        mask.masked_fill_(~valid, float("-inf"))
        self._plan = _DecodePlan(
            slots=slots.flatten(),
            width=slots.shape[1],
            mask=mask[:, None, None, :],
            moved=moved,
            angles=self.rotation.angles(shift.flatten()[moved]),
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
        shift = torch.where(valid, self.home.shift(slots, at[None, :]), 0)
        return slots, shift, valid

    def _run_sdpa_forward_extend(
        self, query: Any, output: Any, k_cache: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._extend_moved:
            k_cache = _RotatingKeys(k_cache, self.home, self.rotation)
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
        turned = self.rotation.rotate(keys.index_select(0, plan.moved), plan.angles)
        # Not index_copy_, which fp8 does not have.
        keys[plan.moved] = turned.to(keys.dtype)
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
