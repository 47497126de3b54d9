# SPDX-License-Identifier: Apache-2.0
"""The largest logit that a query can have with any key of a page, from the page's *bounds*."""

import torch

from sglang_reasoncache.kernels.paged import BACKENDS


def page_logits(
    query: torch.Tensor,
    bounds: torch.Tensor,
    pages: torch.Tensor,
    scale: float,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Compute an upper bound of ``scale * q . k`` over the keys k of each page (Quest, section 3.2).

    In each dim the product is largest with the page's largest key if the query is positive there, else with its
    smallest key. So the bound is one dot product of the query, split by sign, with both bounds side by side.

    Args:
        query: ``[batch, heads, dim]``, fp32, bf16 or fp16; query head h reads KV head
            ``h // (heads / kv_heads)``.
        bounds: ``[num_pages, kv_heads, 2 * dim]``, fp32, bf16 or fp16: the largest key of each page and dim,
            then the smallest.
        pages: int64 ``[batch, count]``, pages of each request; -1 for none.
        scale: Factor of the logits, above 0.
        backend: "native" (PyTorch) or "triton". None: as ``kernels.paged.BACKENDS`` says for the device. On a
            GPU nothing waits for the device.

    Returns:
        fp32 ``[batch, heads, count]``; -inf where ``pages`` is -1 or no page of ``bounds``.
    """
    signed = torch.cat((query.clamp_min(0), query.clamp_max(0)), dim=2)
    if (backend or BACKENDS[query.device.type]) == "triton":
        from sglang_reasoncache.kernels import page_logits_triton

        return page_logits_triton.page_logits(signed, bounds, pages, scale)
    batch, heads, dims = signed.shape
    kv_heads = bounds.shape[1]
    page_bounds = bounds[pages.clamp(0, len(bounds) - 1)].float()
    grouped = signed.float().view(batch, kv_heads, heads // kv_heads, dims)
    logits = torch.einsum("bkgd,bpkd->bkgp", grouped, page_bounds).mul_(scale)
    there = (pages >= 0) & (pages < len(bounds))
    return logits.view(batch, heads, -1).masked_fill_(~there[:, None], float("-inf"))
