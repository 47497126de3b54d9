# SPDX-License-Identifier: Apache-2.0
"""The least and largest key of each page, and what queries may find in it (Quest)."""

from __future__ import annotations

import torch

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv, read_rows
from sglang_reasoncache.kernels.row_plan import RowPlan


class PageBounds:
    """Of one layer. Takes ``2 / page`` of its keys' memory.

    Args:
        keys: ``[num_slots, kv_heads, dim]``, of the pool.
        page: Slots of a page.

    Attributes:
        ends: ``[num_pages, kv_heads, 2 * dim]``, the two below side by side.
        high, low: ``[num_pages, kv_heads, dim]``.
    """

    def __init__(self, keys: torch.Tensor, page: int) -> None:
        slots, heads, dim = keys.shape
        # Not every operator knows fp8.
        dtype = torch.bfloat16 if keys.dtype.itemsize == 1 else keys.dtype
        ends = torch.zeros((-(-slots // page), heads, 2 * dim), dtype=dtype, device=keys.device)
        self._keys, self._page = keys, page
        self.ends = ends
        self.high, self.low = ends[..., :dim], ends[..., dim:]
        # Pages instead of slots. Only the weights of attention to them are read.
        self._paged = PagedKv(ends, ends[..., :1])

    def update(self, slots: torch.Tensor) -> None:
        """Bring the bounds of pages up to date after keys were written to ``slots``.

        A page is filled from its first slot on, so its keys are those up to the last slot.
        ``slots``: int ``[tokens]``; those of a page side by side and ascending.
        """
        if self._paged.backend == "triton":
            from sglang_reasoncache.kernels import select_triton

            select_triton.note_bounds(self._keys, slots, self.ends, self._page)
            return
        slots = slots.long()
        at = torch.arange(self._page)
        after = torch.nn.functional.pad(slots[1:], (0, 1), value=-1)
        last = slots[(slots % self._page == self._page - 1) | (after != slots + 1)]
        pages = last // self._page
        found = (pages[:, None] * self._page + at).clamp(max=len(self._keys) - 1)
        keys = read_rows(self._keys, found)
        beyond = (at > (last % self._page)[:, None])[..., None, None]
        self.high[pages] = keys.masked_fill(beyond, float("-inf")).amax(dim=1).to(self.ends.dtype)
        self.low[pages] = keys.masked_fill(beyond, float("inf")).amin(dim=1).to(self.ends.dtype)

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

        That logit is one dot product: positive dims of the query meet ``high``, negative ones
        ``low``. The shares are the weights of decode attention to the bounds.

        Args:
            query: ``[rows, heads, dim]``.
            plan: Entries are pages, none shifted.
            scale: Of the logits.
            spans, longest: See ``decode_attention``.

        Returns:
            fp32 ``[entries]``, those of one row after the other.
        """
        found = torch.zeros(len(plan.kv_indices), device=self.ends.device)
        signed = torch.cat((query.clamp_min(0), query.clamp_max(0)), dim=-1)
        decode_attention(
            signed, self._paged, plan, scale=scale, spans=spans, weights=found, longest=longest
        )
        return found

    def largest(self, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The logits of :meth:`shares`, unscaled, one query a page.

        fp32 ``[pages, heads, dim]`` and int64 ``[pages]`` to fp32 ``[pages, heads]``.
        """
        grouped = query.unflatten(1, (self.low.shape[1], -1))
        high, low = (side[pages].float()[:, :, None] for side in (self.high, self.low))
        return torch.maximum(grouped * high, grouped * low).sum(dim=-1).flatten(1)
