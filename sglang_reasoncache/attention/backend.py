# SPDX-License-Identifier: Apache-2.0
"""The mixin that adds our attention kernels to one of SGLang's attention backends."""

from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.attention.models import (
    check_attention,
    check_drafts_in_windows,
    check_window_of_decode,
)
from sglang_reasoncache.attention.paged import PagedAttention
from sglang_reasoncache.cache.cached_positions import CachedPositions
from sglang_reasoncache.compat.types import AttentionLayer, ForwardBatch, ModelRunner

#: Base of the mixin. Typed Any, because ``super()`` is one of SGLang's backends at run time.
_Stock: Any = object


class PagedBackend(_Stock):
    """A mixin that a class inherits before one of SGLang's backends. Our kernels compute attention in forwards
    with a plan, a list of the slots to read (see ``PagedAttention``). SGLang's backend does so in all other
    forwards, unless ``always_ours`` is set: then every forward must have a plan. Our kernels skip evicted
    positions, whose entries in ``req_to_token`` are below 0."""

    always_ours = False
    #: How many of a sliding window's oldest positions SGLang's decode kernels do not read. Ours do the same.
    unread = 0
    #: Whether SGLang's decode steps read the model's window in each layer that has one.
    one_window = False
    #: Whether SGLang's verifications of drafted tokens read the positions of sliding windows.
    verifies_windows = True

    def __init__(
        self,
        model_runner: ModelRunner,
        cached: CachedPositions | None,
        *,
        requested_by: str,
        **stock: Any,
    ) -> None:
        """``cached``: the position for which each slot's key was rotated. If a request uses a slot at another
        position, the slot's key is rotated to that position. With None, keys are read as cached.
        ``requested_by``: the flags that chose this backend; every error message begins with them. ``stock``:
        arguments of SGLang's backend. Raises ValueError for a model that our kernels do not support and, with
        ``cached``, for a model whose cached keys cannot be rotated to other positions."""
        check_attention(model_runner, requested_by)
        if self.one_window:
            check_window_of_decode(model_runner, requested_by)
        check_drafts_in_windows(model_runner, requested_by, reads_windows=self.verifies_windows)
        self.requested_by = requested_by
        # PagedAttention may raise, so it is made before SGLang's backend takes memory.
        self.paged = PagedAttention(model_runner, cached, self.unread)
        super().__init__(model_runner, **stock)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``q`` ``[batch, heads * dim]``; returns ``[batch, heads * v_dim]``. FlashInfer's backends for
        latent attention get ``q`` and ``k`` ``[batch, heads, dim]`` without their rotated dims, and get these
        as ``q_rope`` and ``k_rope`` ``[batch, heads, dim]``. With ``cos_sin_cache`` these are not yet rotated
        (trtllm_mla over an fp8 KV cache)."""
        self.paged.keep(q, layer)
        if self.paged.rows is None and not self.always_ours:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        q, sinks = self._put(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        return self.paged.decode(q, layer, sinks)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``q`` ``[tokens, heads * dim]``; returns ``[tokens, heads * v_dim]``. ``kwargs``: see
        :meth:`forward_decode`."""
        if self.paged.rows is not None:
            # The verification of drafted tokens, which SGLang runs as an extend.
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        self.paged.keep(q, layer)
        planned = self.paged.extend_plan is not None
        if planned and self.paged.is_expanded(layer):
            if not self.paged.expands:
                raise RuntimeError(
                    f"{self.requested_by}: expanded rows in a forward of our kernels"
                )
            planned = False
        if not planned and not self.always_ours:
            out = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            self.paged.written(layer)
            return out
        q, sinks = self._put(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        return self.paged.extend(q, layer, forward_batch, sinks)

    def _put(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Put new keys and values into the pool. Returns whole queries, and the sinks."""
        if kwargs.get("cos_sin_cache") is not None:
            q, k = self._rotated(q, k, forward_batch, kwargs)
        q = _whole(q, kwargs.pop("q_rope", None))
        k = _whole(k, kwargs.pop("k_rope", None))
        sinks = kwargs.pop("sinks", None)
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise ValueError(
                f"{self.requested_by}: attention with {', '.join(unknown)} is not supported"
            )
        self.paged.put(k, v, layer, forward_batch, save_kv_cache)
        self.paged.written(layer)
        return q, sinks

    def _rotated(
        self, q: torch.Tensor, k: Any, forward_batch: ForwardBatch, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole queries and keys of latent attention in the model's dtype, rotated to their positions and
        rounded to fp8 by SGLang's kernel, as in SGLang's backend. Takes what it uses out of ``kwargs``."""
        q_rope = kwargs.pop("q_rope")
        k_rope = kwargs.pop("k_rope")
        scaling = kwargs.pop("llama_4_scaling", None)
        rounded, latent, turned = compat.mla_quantize_and_rope_for_fp8(
            q,
            q_rope,
            k.squeeze(1),
            k_rope.squeeze(1),
            forward_batch.positions,
            kwargs.pop("cos_sin_cache"),
            kwargs.pop("is_neox"),
            k.shape[-1],
            k_rope.shape[-1],
        )
        dtype = self.paged.dtype
        queries = rounded.to(dtype)
        if scaling is not None:
            queries = queries * scaling
        return queries, torch.cat((latent.to(dtype), turned.to(dtype)), dim=-1).unsqueeze(1)


def _whole(side: torch.Tensor | None, rotated: torch.Tensor | None) -> Any:
    """``side``, a query or a key, with its rotated dims appended if these were passed separately."""
    if side is None or rotated is None:
        return side
    return torch.cat((side.reshape(*rotated.shape[:2], -1), rotated), dim=2)
