# SPDX-License-Identifier: Apache-2.0
"""The least and largest key of each page, and what queries may find between them (Quest).

Both have kernels of their own: in PyTorch every layer would copy the bounds of all pages before it
multiplies them (three to six times slower in host memory), and every written token would read its
whole page."""

import torch

from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv, read_rows
from sglang_reasoncache.kernels.row_plan import RowPlan


class PageBounds:
    """Bounds of the pages of one layer. They take ``2 / page`` of the memory of its keys.

    Args:
        keys: ``[num_slots, kv_heads, dim]``, of the pool.
        page: Slots of a page.

    Attributes:
        ends: ``[num_pages, kv_heads, 2 * dim]``, high and low side by side.
        high, low: ``[num_pages, kv_heads, dim]``, largest and least keys.
        on_gpu: Triton kernels read and write them.
    """

    def __init__(self, keys: torch.Tensor, page: int) -> None:
        slots, heads, dim = keys.shape
        # Not every operator knows fp8.
        dtype = torch.bfloat16 if keys.dtype.itemsize == 1 else keys.dtype
        ends = torch.zeros((-(-slots // page), heads, 2 * dim), dtype=dtype, device=keys.device)
        self._keys, self._page = keys, page
        self.ends = ends
        self.high, self.low = ends[..., :dim], ends[..., dim:]
        # Pages in place of slots. Only the weights of attention to them are used.
        self._paged = PagedKv(ends, ends[..., :1])
        self.on_gpu = self._paged.backend == "triton"

    def update(self, slots: torch.Tensor) -> None:
        """Bring the bounds of pages up to date after keys were written to ``slots``.

        A page is filled from its first slot on, so its keys are those up to the last slot.
        ``slots``: int ``[tokens]``; those of a page side by side and ascending.
        """
        if self.on_gpu:
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

    def shares(self, query: torch.Tensor, pages: torch.Tensor, scale: float) -> torch.Tensor:
        """Each head's softmax over a row's pages, by the largest logit that a key between a page's
        bounds can have; added up over heads.

        That logit is one dot product: positive dims of the query meet ``high``, negative ones ``low``.

        Args:
            query: ``[rows, heads, dim]``, fp32, bf16 or fp16.
            pages: int64 ``[rows, pages]``; -1 takes no share.
            scale: Of the logits.

        Returns:
            fp32 ``[rows, pages]``.
        """
        signed, listed = torch.cat((query.clamp_min(0), query.clamp_max(0)), dim=-1), pages >= 0
        if self.on_gpu:
            from sglang_reasoncache.kernels import select_triton

            shares = select_triton.page_shares(signed, self.ends, pages, scale)
            return shares.masked_fill_(~listed, 0.0)
        # The shares are the weights of decode attention to the bounds.
        found, entries = torch.zeros(pages.shape), pages[listed].to(torch.int32)
        indptr = torch.nn.functional.pad(listed.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
        weights = torch.zeros(len(entries))
        plan = RowPlan(indptr, entries, None)
        decode_attention(signed, self._paged, plan, scale=scale, weights=weights)
        found[listed] = weights
        return found
