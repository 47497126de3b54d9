# SPDX-License-Identifier: Apache-2.0
"""Every kernel in plain PyTorch: the reference of the others, and their stand-in.

Rows and blocks are gathered, keys rotated in fp32, then read densely: no tiles, no running
softmax, no rotated queries. Raises ValueError where a value is out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_reasoncache.kernels.paged import read_keys, read_rows
from sglang_reasoncache.kernels.row_plan import TILE, Rotations, RowPlan

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.paged import PagedKv
    from sglang_reasoncache.kernels.rotation import KeyRotation


def _check_slots(name: str, slots: Tensor, num_slots: int) -> None:
    """Raises ValueError where a slot is outside the pool; waits for the device."""
    if slots.numel() and (slots.min() < 0 or slots.max() >= num_slots):
        raise ValueError(f"{name} has a slot outside the pool")


def _check_ranges(indptr: Tensor, ranges: int, total: int) -> None:
    """Raises ValueError where ranges go beyond ``total``; waits for the device."""
    if (
        len(indptr) != ranges + 1
        or indptr[0] < 0
        or indptr[-1] > total
        or (indptr.diff() < 0).any()
    ):
        raise ValueError("tile_ptr goes beyond the rotations")


def _check_shift(shift: Tensor, rotation: KeyRotation) -> None:
    """Raises ValueError where the rotary table lacks a shift; waits for the device."""
    if shift.numel() and shift.long().abs().max() >= len(rotation.cos):
        raise ValueError("shift has an entry beyond the rotary table")


def plan_rows(
    rows: Tensor,
    requests: Tensor,
    lengths: Tensor,
    cached_at: Tensor | None,
    num_slots: int,
    merge: bool,
) -> RowPlan:
    """See :func:`sglang_reasoncache.kernels.plan.plan_rows`; on a device it waits for it."""
    if requests.numel():
        if requests.min() < 0 or requests.max() >= rows.shape[0]:
            raise ValueError("plan: requests has an index outside the rows")
        if lengths.min() < 0 or lengths.max() > rows.shape[1]:
            raise ValueError("plan: lengths has an entry below 0 or beyond a row's end")
    at = torch.arange(rows.shape[1], device=rows.device)
    slots = rows[requests]
    used = (at < lengths[:, None]) & (slots >= 0)
    _check_slots("rows", slots[used], num_slots)
    shifts = None
    if cached_at is not None:
        home = cached_at[slots.clamp(0, num_slots - 1).long()]
        shifts = at.to(torch.int32) - home
    if merge and shifts is not None:
        return _merged(slots, used, home.long(), shifts, (home >= 0) & (home < lengths[:, None]))
    kv_indptr = F.pad(used.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    shift = None if shifts is None or not shifts[used].any() else shifts[used]
    return RowPlan(kv_indptr, slots[used], shift)


def _merged(slots: Tensor, used: Tensor, home: Tensor, shifts: Tensor, at_home: Tensor) -> RowPlan:
    """A plan with rotations; arguments are ``[batch, width]``."""
    width = slots.shape[1]
    there = slots.gather(1, home.clamp(0, max(0, width - 1)))
    moved = used & (shifts != 0)
    aliases = moved & at_home & (there == slots)
    entries = used & ~aliases
    kv_indptr = F.pad(entries.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
    of_positions = entries, moved, aliases, home, shifts
    rotations = _rotations(kv_indptr, *of_positions) if moved.any() else None
    return RowPlan(kv_indptr, slots[entries], None, rotations)


def _rotations(
    kv_indptr: Tensor, entries: Tensor, moved: Tensor, aliases: Tensor, home: Tensor, shifts: Tensor
) -> Rotations:
    """Of every tile with a position that is ``moved``: its entries' own positions, then one for each
    run of neighbouring positions of one sort and one shift. Other arguments: ``[batch, width]``."""
    row, at = moved.nonzero().unbind(1)
    alias, by = aliases[row, at], shifts[row, at]
    entry = (entries.cumsum(dim=1) - 1)[row, torch.where(alias, home[row, at], at)]
    first = kv_indptr // TILE + torch.arange(len(kv_indptr), device=row.device)
    tile, bit = first[row] + entry // TILE, 1 << entry % TILE
    begins = torch.ones_like(alias)
    same = (at[1:] == at[:-1] + 1) & (tile[1:] == tile[:-1]) & (by[1:] == by[:-1])
    begins[1:] = ~same | (alias[1:] != alias[:-1])
    bits = bit.new_zeros(int(begins.sum())).index_add_(0, begins.cumsum(0) - 1, bit)
    own = tile.unique()
    shifted = bit.new_zeros(int(first[-1]) + 1).index_add_(0, tile, bit * ~alias)[own]
    tile = torch.cat((own, tile[begins]))
    order = tile.argsort(stable=True)
    by = torch.cat((by.new_zeros(len(own)), by[begins]))[order]
    tile_ptr = F.pad(torch.bincount(tile, minlength=int(first[-1])).cumsum(0), (1, 0))
    return Rotations(tile_ptr.to(torch.int32), by, torch.cat((~shifted, bits))[order])


def spelled_out(rows: RowPlan) -> RowPlan:
    """The same with an entry for every use of a key: a request's rotations behind its entries that
    have none."""
    kv_indptr, kv_indices, _, rotations = rows
    if rotations is None:
        return rows
    tile_ptr, by, bits = rotations
    _check_ranges(tile_ptr, len(kv_indices) // TILE + len(kv_indptr) - 1, len(by))
    batch = torch.arange(len(kv_indptr), device=by.device)
    first = kv_indptr // TILE + batch
    request = batch[:-1].repeat_interleave(kv_indptr.diff())
    at = torch.arange(len(kv_indices), device=by.device)
    plain = (tile_ptr.diff() == 0)[first[request] + (at - kv_indptr[request]) // TILE]
    tile = torch.arange(len(tile_ptr) - 1, device=by.device).repeat_interleave(tile_ptr.diff())
    one, bit = ((bits[:, None] >> torch.arange(TILE, device=by.device)) & 1).nonzero().T
    of = torch.searchsorted(first, tile, right=True)[one] - 1
    entry = kv_indptr[of] + (tile[one] - first[of]) * TILE + bit
    there = entry < kv_indptr[of + 1]
    requests, order = torch.cat((request[plain], of[there])).sort(stable=True)
    shift = torch.cat((torch.zeros_like(kv_indices[plain]), by[one][there]))[order]
    counts = torch.bincount(requests, minlength=len(kv_indptr) - 1)
    return RowPlan(
        F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
        torch.cat((kv_indices[plain], kv_indices[entry[there]]))[order],
        shift if shift.any() else None,
    )


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
    if plan.rotations is not None:
        plan = spelled_out(plan)
        spans = plan.kv_indptr[:-1], plan.kv_indptr[1:]
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
) -> Tensor:
    """See ``DistanceKernel.squares``. Values are checked on the CPU alone: that would wait for
    other devices."""
    if dst_slots.device.type == "cpu":
        _check_slots("dst_slots", dst_slots, len(layers[0][0]))
        _check_slots("src_slots", src_slots, len(layers[0][0]))
        if shift is not None and rotation is not None:
            _check_shift(shift, rotation)
    found = []
    for keys, values in layers:
        k = read_rows(keys, dst_slots) - read_keys(keys, src_slots, shift, rotation)
        v = read_rows(values, dst_slots) - read_rows(values, src_slots)
        found += [difference.square_().sum(dim=(1, 2, 3)) for difference in (k, v)]
    return torch.stack(found, dim=1).unflatten(1, (-1, 2)).double()
