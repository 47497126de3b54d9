# SPDX-License-Identifier: Apache-2.0
"""Paged attention in plain PyTorch: the reference of the kernels, and their stand-in.

Gathers every row, rotates its keys in fp32, then attends densely: no tiles, no
running softmax, no rotated queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.kernels.pool import read_rows

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation


def plan_rows(
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None,
    num_slots: int,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`sglang_reasoncache.kernels.plan.plan_rows`; on a device it waits for it.

    Raises:
        ValueError: a request, length or slot out of range.
    """
    if requests.numel():
        if requests.min() < 0 or requests.max() >= rows.shape[0]:
            raise ValueError("plan: requests has an index outside the rows")
        if lengths.min() < 0 or lengths.max() > rows.shape[1]:
            raise ValueError("plan: lengths has an entry below 0 or beyond a row's end")
    at = torch.arange(rows.shape[1], device=rows.device)
    used = at < lengths[:, None]
    if window is not None:
        used &= at >= lengths[:, None] - window
    slots = rows[requests]
    used &= slots >= 0
    kv_indices = slots[used]
    if kv_indices.numel() and kv_indices.max() >= num_slots:
        raise ValueError("plan: a slot outside the pool")
    kv_indptr = torch.nn.functional.pad(used.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    if cached_at is None:
        return kv_indptr, kv_indices, None
    shift = at.expand_as(slots)[used].to(torch.int32) - cached_at[kv_indices.long()]
    return kv_indptr, kv_indices, shift if bool(shift.any()) else None


def gather_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_indices: torch.Tensor,
    shift: torch.Tensor | None,
    rotation: KeyRotation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 keys ``[count, heads, k_dim]``, rotated by their shift, and values.

    Raises:
        ValueError: a slot or shift out of range.
    """
    slots = kv_indices.long()
    if slots.numel() and (slots.min() < 0 or slots.max() >= keys.shape[0]):
        raise ValueError("gather: a slot outside the pool")
    k, v = read_rows(keys, slots), read_rows(values, slots)
    if shift is not None and rotation is not None and shift.numel():
        if shift.long().abs().max() >= rotation.cos.shape[0]:
            raise ValueError("gather: shift has an entry beyond the rotary table")
        # Untouched entries stay as they are even if they are not finite: inf * 0 is NaN.
        k = torch.where((shift != 0)[:, None, None], rotation.rotate(k, rotation.angles(shift)), k)
    return k, v


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    begin: torch.Tensor,
    end: torch.Tensor,
    kv_indices: torch.Tensor,
    shift: torch.Tensor | None,
    rotation: KeyRotation | None,
    scale: float,
    logit_cap: float,
    sinks: torch.Tensor | None,
    weight_sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 output ``[batch, heads, v_dim]`` and log-sum-exp ``[batch, heads]``.

    ``weight_sums``: ``weights`` of :func:`sglang_reasoncache.kernels.decode.decode_attention`.

    Raises:
        ValueError: a slot, range or shift out of bounds.
    """
    batch, heads, _ = query.shape
    k, v = gather_kv(keys, values, kv_indices, shift, rotation)
    out = torch.zeros((batch, heads, values.shape[2]), device=query.device)
    lse = torch.full((batch, heads), float("-inf"), device=query.device)
    group = heads // keys.shape[1]
    at = 0
    for b, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        if not 0 <= first <= last <= len(k):
            raise ValueError("decode: begin and end go beyond kv_indices")
        row_k = k[first:last].repeat_interleave(group, dim=1)
        row_v = v[first:last].repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,nhd->hn", query[b].float(), row_k) * scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if sinks is not None:
            logits = torch.cat((logits, sinks.float()[:, None]), dim=1)
        if logits.shape[1]:
            lse[b] = logits.logsumexp(dim=1)
            weights = logits.softmax(dim=1)[:, : last - first]
            out[b] = torch.einsum("hn,nhd->hd", weights, row_v)
            if weight_sums is not None:
                weight_sums[at : at + last - first] += weights.sum(dim=0)
        at += last - first
    return out, lse
