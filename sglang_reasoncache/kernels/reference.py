# SPDX-License-Identifier: Apache-2.0
"""Every kernel in plain PyTorch: the reference of the others, and their stand-in.

Rows and blocks are gathered, keys rotated in fp32, then read densely: no tiles, no running
softmax, no rotated queries. Raises ValueError where a value is out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_reasoncache.kernels.paged import read_keys, read_rows

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.paged import PagedKv
    from sglang_reasoncache.kernels.plan import RowPlan
    from sglang_reasoncache.kernels.rotation import KeyRotation


def _check_slots(name: str, slots: Tensor, num_slots: int) -> None:
    """Raises ValueError where a slot is outside the pool; waits for the device."""
    if slots.numel() and (slots.min() < 0 or slots.max() >= num_slots):
        raise ValueError(f"{name} has a slot outside the pool")


def _check_shift(shift: Tensor, rotation: KeyRotation) -> None:
    """Raises ValueError where the rotary table lacks a shift; waits for the device."""
    if shift.numel() and shift.long().abs().max() >= len(rotation.cos):
        raise ValueError("shift has an entry beyond the rotary table")


def plan_rows(
    rows: Tensor, requests: Tensor, lengths: Tensor, cached_at: Tensor | None, num_slots: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See :func:`sglang_reasoncache.kernels.plan.plan_rows`; on a device it waits for it."""
    if requests.numel():
        if requests.min() < 0 or requests.max() >= rows.shape[0]:
            raise ValueError("plan: requests has an index outside the rows")
        if lengths.min() < 0 or lengths.max() > rows.shape[1]:
            raise ValueError("plan: lengths has an entry below 0 or beyond a row's end")
    at = torch.arange(rows.shape[1], device=rows.device)
    slots = rows[requests]
    used = (at < lengths[:, None]) & (slots >= 0)
    kv_indices = slots[used]
    _check_slots("rows", kv_indices, num_slots)
    kv_indptr = torch.nn.functional.pad(used.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    if cached_at is None:
        return kv_indptr, kv_indices, None
    shift = at.expand_as(slots)[used].to(torch.int32) - cached_at[kv_indices.long()]
    return kv_indptr, kv_indices, shift if bool(shift.any()) else None


def gather(kv: PagedKv, kv_indices: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp32 keys ``[count, heads, k_dim]``, rotated by their shift, and values."""
    slots = kv_indices.long()
    _check_slots("kv_indices", slots, kv.num_slots)
    if shift is not None and kv.rotation is not None:
        _check_shift(shift, kv.rotation)
    return read_keys(kv.keys, slots, shift, kv.rotation), read_rows(kv.values, slots)


def decode(
    kv: PagedKv,
    query: Tensor,
    out: Tensor,
    plan: RowPlan,
    spans: tuple[Tensor, Tensor],
    sinks: Tensor | None,
    scale: float,
    logit_cap: float,
    weight_sums: Tensor | None,
) -> None:
    """See :func:`sglang_reasoncache.kernels.decode.decode_attention`; computes in fp32."""
    bounds = list(zip(*(side.tolist() for side in spans), strict=True))
    if not all(0 <= first <= last <= len(plan.kv_indices) for first, last in bounds):
        raise ValueError("decode: begin and end go beyond kv_indices")
    k, v = gather(kv, plan.kv_indices, plan.shift)
    group = query.shape[1] // kv.num_heads
    at = 0
    for b, (first, last) in enumerate(bounds):
        row_k = k[first:last].repeat_interleave(group, dim=1)
        row_v = v[first:last].repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,nhd->hn", query[b].float(), row_k) * scale
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if sinks is not None:
            logits = torch.cat((logits, sinks[:, None]), dim=1)
        weights = logits.softmax(dim=1)[:, : last - first]
        out[b] = torch.einsum("hn,nhd->hd", weights, row_v)
        if weight_sums is not None:
            weight_sums[at : at + last - first] += weights.sum(dim=0)
        at += last - first


def distance(
    layers: Sequence[tuple[Tensor, Tensor]],
    rotation: KeyRotation | None,
    dst_slots: Tensor,
    src_slots: Tensor,
    shift: Tensor | None,
    moments: bool,
) -> Tensor:
    """See ``DistanceKernel.squares`` and, with ``moments``, ``DistanceKernel.moments``.

    Values are checked on the CPU alone: that would wait for other devices.
    """
    if dst_slots.device.type == "cpu":
        _check_slots("dst_slots", dst_slots, len(layers[0][0]))
        _check_slots("src_slots", src_slots, len(layers[0][0]))
        if shift is not None and rotation is not None:
            _check_shift(shift, rotation)
    found = []
    for keys, values in layers:
        for x, y in (
            (read_rows(keys, dst_slots), read_keys(keys, src_slots, shift, rotation)),
            (read_rows(values, dst_slots), read_rows(values, src_slots)),
        ):
            terms = (x * x, y * y, x * y) if moments else ((x - y).square_(),)
            found.append(torch.stack([term.sum(dim=(1, 2, 3)) for term in terms], dim=-1))
    shape = (len(dst_slots), len(layers), 2, *[3] * moments)
    return torch.stack(found, dim=1).view(shape).double()
