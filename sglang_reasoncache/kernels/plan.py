# SPDX-License-Identifier: Apache-2.0
"""Request rows to FlashInfer's ``kv_indptr`` and ``kv_indices``, once per forward."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, NamedTuple

import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels import reference
from sglang_reasoncache.native.pool import call


class RowPlan(NamedTuple):
    """Which slots the queries of a forward read; every layer uses the same.

    Entries of request b are ``kv_indptr[b]`` to ``kv_indptr[b + 1]``, in the order of their
    positions, single tokens whatever the page size of the pool.
    """

    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_indices: torch.Tensor  # int32 [total], slots
    #: int32 ``[total]``, positions by which to rotate each key (where it is used minus where it
    #: was cached); None where all are 0.
    shift: torch.Tensor | None


def plan_rows(
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None = None,
    *,
    num_slots: int,
) -> RowPlan:
    """Flatten the rows of a batch, by C++ in host memory.

    Elsewhere by PyTorch, which waits for the device; ``plan_triton.plan_into`` does not.

    Args:
        rows: int32 ``[num_rows, width]`` (``req_to_token``), the slot of each position; below 0
            where a position was evicted: no entry, later positions unchanged.
        requests: int ``[batch]``, index of each request's row.
        lengths: int ``[batch]``, positions in use, at most ``width``.
        cached_at: int32 ``[num_slots]``, position each slot's key was rotated for; None: its own.
        num_slots: Slots of the pool, the bound of every entry.

    Raises:
        ValueError: tensors of wrong dtype or shape; a request, length or slot out of range.
    """
    if rows.dtype != torch.int32 or rows.dim() != 2:
        raise ValueError(
            f"rows must be int32 [num_rows, width], got {rows.dtype} {list(rows.shape)}"
        )
    if requests.dim() != 1 or lengths.shape != requests.shape:
        raise ValueError(
            f"requests and lengths must be [batch], got {list(requests.shape)}, {list(lengths.shape)}"
        )
    if cached_at is not None:
        if cached_at.dtype != torch.int32 or cached_at.shape != (num_slots,):
            raise ValueError(
                f"cached_at must be int32 [{num_slots}], "
                f"got {cached_at.dtype} {list(cached_at.shape)}"
            )
        cached_at = cached_at.contiguous()
    requests, lengths = requests.long().contiguous(), lengths.long().contiguous()
    library = None
    if rows.device.type == "cpu" and rows.stride(1) == 1:
        with contextlib.suppress(native.NativeUnavailable):
            library = native.library()
    if library is None:
        return RowPlan(*reference.plan_rows(rows, requests, lengths, cached_at, num_slots))
    capacity = max(0, int(lengths.sum()))
    kv_indptr = torch.empty(len(requests) + 1, dtype=torch.int32)
    kv_indices = torch.empty(capacity, dtype=torch.int32)
    shift = None if cached_at is None else torch.empty_like(kv_indices)
    is_shifted = ctypes.c_int32()
    table = rows, len(rows), rows.stride(0), rows.shape[1]
    batch = requests, lengths, len(requests), cached_at, num_slots
    outputs = kv_indptr, kv_indices, shift, capacity, ctypes.byref(is_shifted)
    call(library, "plan", *table, *batch, *outputs)
    total = int(kv_indptr[-1])
    if shift is not None:
        shift = shift[:total] if is_shifted.value else None
    return RowPlan(kv_indptr, kv_indices[:total], shift)


class BatchRows(NamedTuple):
    """Of one forward."""

    plan: Any  # a RowPlan; on a GPU PlanBuffers with positions
    requests: torch.Tensor  # int [batch], rows
    lengths: torch.Tensor  # int [batch], their positions, new ones included
    longest: int  # upper bound on lengths
