# SPDX-License-Identifier: Apache-2.0
"""Request rows to FlashInfer's ``kv_indptr`` and ``kv_indices``, once per forward."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels import attention_reference, row_order

BACKENDS = ("native", "triton", "torch")


class RowPlan(NamedTuple):
    """Which slots the queries of a forward read; every layer uses the same.

    Entries of request b are ``kv_indptr[b]`` to ``kv_indptr[b + 1]``, in the order
    of their positions unless asked otherwise. Entries are single tokens whatever
    the page size of the pool.

    Attributes:
        kv_indptr: int32 ``[batch + 1]``.
        kv_indices: int32 ``[total]``, slots.
        shift: int32 ``[total]``, positions by which to rotate each key (where it is
            used minus where it was computed); None where all are 0.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    shift: torch.Tensor | None


def plan_rows(
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None = None,
    *,
    num_slots: int,
    window: int | None = None,
    keep: torch.Tensor | None = None,
    together: bool = False,
    backend: str | None = None,
) -> RowPlan:
    """Flatten the rows of a batch.

    On a CUDA device this waits for it; :func:`~.plan_triton.plan_into` does not.

    Args:
        rows: int32 ``[num_rows, width]`` (``req_to_token``), the slot of each position;
            below 0 where a position was dropped: no entry, later positions unchanged.
        requests: int ``[batch]``, index of each request's row.
        lengths: int ``[batch]``, positions in use, at most ``width``.
        home: int32 ``[num_slots]``, position each slot's key was rotated for; None
            where every slot is used at home.
        num_slots: Slots of the pool, the bound of every entry.
        window: Only that many of the newest positions of each request; None: all.
        keep: bool ``[batch, positions]``, at least as many positions as the longest request
            has: which of them are read in this step. None: all.
        together: Entries of one slot near each other instead of in order of positions,
            in rows with a moved entry (without ``cached_at``: in all rows); the order is
            that of :mod:`~sglang_reasoncache.kernels.row_order`.
        backend: One of :data:`BACKENDS`; None takes the first that can read the rows.

    Raises:
        ValueError: tensors of wrong dtype or shape, an unknown backend or one that
            cannot read the rows; by "native" and "torch", a request, length or slot
            out of range. "triton" drops such entries, see ``plan_into``.
        sglang_reasoncache.native.NativeUnavailable: ``backend`` is "native" and the
            C++ library cannot be had.
    """
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if rows.dtype != torch.int32 or rows.dim() != 2:
        raise ValueError(
            f"rows must be int32 [num_rows, width], got {rows.dtype} {list(rows.shape)}"
        )
    if requests.dim() != 1 or lengths.shape != requests.shape:
        raise ValueError(
            f"requests and lengths must be [batch], got {list(requests.shape)}, {list(lengths.shape)}"
        )
    if cached_at is not None and (
        cached_at.dtype != torch.int32 or cached_at.shape != (num_slots,)
    ):
        raise ValueError(
            f"home must be int32 [{num_slots}], got {cached_at.dtype} {list(cached_at.shape)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    requests, lengths = requests.long().contiguous(), lengths.long().contiguous()
    if keep is not None:
        if keep.dtype != torch.bool or keep.dim() != 2 or keep.shape[0] != len(requests):
            raise ValueError(
                f"keep must be bool [{len(requests)}, positions], got {keep.dtype} {list(keep.shape)}"
            )
        # What is not kept is an evicted position, for this step.
        rows = rows[requests, : keep.shape[1]].masked_fill(~keep[:, : rows.shape[1]], -1)
        requests = torch.arange(len(requests), device=rows.device)
    side_by_side = rows.stride(1) == 1
    on_host = rows.device.type == "cpu" and side_by_side
    if backend == "native" or (backend is None and on_host):
        if not on_host:
            raise ValueError(f"native: rows on {rows.device} with strides {rows.stride()}")
        try:
            library = native.library()
        except native.NativeUnavailable:
            if backend == "native":
                raise
        else:
            from sglang_reasoncache.native.attention import native_plan

            return RowPlan(
                *native_plan(
                    library,
                    rows,
                    requests,
                    lengths,
                    None if cached_at is None else cached_at.contiguous(),
                    num_slots,
                    -1 if window is None else window,
                    capacity=max(0, int(lengths.sum())),
                    together=together,
                )
            )
    flatten = attention_reference.plan_rows
    if backend == "triton" or (backend is None and rows.device.type == "cuda" and side_by_side):
        try:
            from sglang_reasoncache.kernels import plan_triton
        except ImportError as error:
            if backend == "triton":
                raise ValueError(f"triton: {error}") from error
        else:
            flatten = plan_triton.plan_rows
    plan = RowPlan(*flatten(rows, requests, lengths, cached_at, num_slots, window))
    if not together:
        return plan
    order = row_order.together(*plan, cached_at)
    shift = None if plan.shift is None else plan.shift[order]
    return RowPlan(plan.kv_indptr, plan.kv_indices[order], shift)
