# SPDX-License-Identifier: Apache-2.0
"""The least and largest key of each page, and what queries may find in it (Quest)."""

from __future__ import annotations

import torch

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.plan import RowPlan


class PageBounds:
    """Of one layer: ``2 / page`` of its keys' memory.

    Args:
        keys: ``[num_slots, kv_heads, dim]``, of the pool.
        page: Slots of a page.

    Attributes:
        ends: ``[num_pages, kv_heads, 2 * dim]``, the two below side by side.
        high, low: ``[num_pages, kv_heads, dim]``.
    """

    def __init__(self, keys: torch.Tensor, page: int) -> None:
        slots, heads, dim = keys.shape
        # Not every operator knows fp8; what is written is noted before it is rounded to it.
        dtype = torch.bfloat16 if keys.dtype.itemsize == 1 else keys.dtype
        ends = torch.zeros((-(-slots // page), heads, 2 * dim), dtype=dtype, device=keys.device)
        self._page = page
        self.ends = ends
        self.high, self.low = ends[..., :dim], ends[..., dim:]
        # Pages in place of slots; of attention to them only the weights are wanted.
        self._paged = PagedKv(ends, ends[..., :1])

    def note(self, slots: torch.Tensor, keys: torch.Tensor, *, apart: bool = False) -> None:
        """Keys ``[tokens, kv_heads, dim]`` were written to ``slots`` (int ``[tokens]``), each of
        another page if ``apart``."""
        slots = slots.long()
        keys = keys.view(len(slots), *self.low.shape[1:]).to(self.low.dtype)
        pages, places = slots // self._page, slots % self._page
        # A page is filled from its first slot on.
        fresh = pages[places == 0]
        self.low[fresh], self.high[fresh] = float("inf"), float("-inf")
        if apart:
            self._widen(pages, keys)
            return
        for place in range(self._page):
            here = (places == place).nonzero()[:, 0]
            self._widen(pages[here], keys[here])

    def _widen(self, pages: torch.Tensor, keys: torch.Tensor) -> None:
        self.low[pages] = torch.minimum(self.low[pages], keys)
        self.high[pages] = torch.maximum(self.high[pages], keys)

    def shares(
        self,
        query: torch.Tensor,
        plan: RowPlan,
        scale: float,
        *,
        spans: tuple[torch.Tensor, torch.Tensor] | None = None,
        longest: int | None = None,
    ) -> torch.Tensor:
        """Each head's softmax over a row's pages, by the largest logit that a key between a
        page's bounds can have; added up over heads.

        That logit is, per dim, the larger of the products with either bound: positive dims of
        the query meet ``high``, negative ones ``low``. So it is one dot product, and the rest
        is what decode attention gives as weights.

        Args:
            query: ``[rows, heads, dim]``.
            plan: Entries are pages; as they are, not moved.
            scale: Of the logits.
            spans, longest: See ``decode_attention``.

        Returns:
            fp32 ``[entries]``, those of one row after the other.
        """
        found = torch.zeros(len(plan.kv_indices), device=self.ends.device)
        signed = torch.cat((query.clamp_min(0), query.clamp_max(0)), dim=-1)
        decode_attention(
            signed,
            self._paged,
            plan,
            scale=scale,
            spans=spans,
            weights=found,
            longest=longest,
        )
        return found

    def largest(self, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The logits of :meth:`shares`, unscaled, one query a page.

        Args:
            query: fp32 ``[pages, heads, dim]``.
            pages: int64 ``[pages]``.

        Returns:
            fp32 ``[pages, heads]``.
        """
        grouped = query.unflatten(1, (self.low.shape[1], -1))
        high, low = (side[pages].float()[:, :, None] for side in (self.high, self.low))
        return torch.maximum(grouped * high, grouped * low).sum(dim=-1).flatten(1)
