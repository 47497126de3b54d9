# SPDX-License-Identifier: Apache-2.0
"""The mixin that adds our attention kernels to one of SGLang's attention backends."""

from typing import Any

import torch

from sglang_reasoncache.attention.models import check_attention
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
        """``q`` ``[batch, heads * dim]``; returns ``[batch, heads * v_dim]``. FlashInfer's backend for
        latent attention gets ``q`` and ``k`` without their rotated dims, and gets these as ``q_rope`` and
        ``k_rope`` ``[batch, heads, dim]``."""
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
        if self.paged.extend_plan is None and not self.always_ours:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
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
        q = _whole(q, kwargs.pop("q_rope", None))
        k = _whole(k, kwargs.pop("k_rope", None))
        sinks = kwargs.pop("sinks", None)
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise ValueError(
                f"{self.requested_by}: attention with {', '.join(unknown)} is not supported"
            )
        self.paged.put(k, v, layer, forward_batch, save_kv_cache)
        return q, sinks


def _whole(side: torch.Tensor | None, rotated: torch.Tensor | None) -> Any:
    """``side``, a query or a key, with its rotated dims appended if these were passed separately."""
    if side is None or rotated is None:
        return side
    return torch.cat((side.reshape(*rotated.shape[:2], -1), rotated), dim=2)
