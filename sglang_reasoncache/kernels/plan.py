# SPDX-License-Identifier: Apache-2.0
"""Request rows to FlashInfer's ``kv_indptr`` and ``kv_indices``, once per forward."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels import attention_reference


class RowPlan(NamedTuple):
    """Which slots the queries of a forward read; every layer uses the same.

    Entries of request b are ``kv_indptr[b]`` to ``kv_indptr[b + 1]``, in the order
    of their positions. Entries are single tokens whatever the page size of the pool.

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
    home: torch.Tensor | None = None,
    *,
    num_slots: int,
    window: int | None = None,
    backend: str | None = None,
) -> RowPlan:
    """Flatten the rows of a batch.

    Args:
        rows: int32 ``[num_rows, width]`` (``req_to_token``), the slot of each position;
            below 0 where a position was dropped: no entry, later positions unchanged.
        requests: int ``[batch]``, index of each request's row.
        lengths: int ``[batch]``, positions in use, at most ``width``.
        home: int32 ``[num_slots]``, position each slot's key was rotated for; None
            where every slot is used at home.
        num_slots: Slots of the pool, the bound of every entry.
        window: Only that many of the newest positions of each request; None: all.
        backend: "native" or "torch"; None takes the first that is available.

    Raises:
        ValueError: tensors of wrong dtype or shape, a request, length or slot out of
            range, an unknown backend.
        sglang_reasoncache.native.NativeUnavailable: ``backend`` is "native" and the
            C++ library cannot be had.
    """
    if backend not in (None, "native", "torch"):
        raise ValueError(f"backend must be native or torch, got {backend!r}")
    if rows.dtype != torch.int32 or rows.dim() != 2:
        raise ValueError(
            f"rows must be int32 [num_rows, width], got {rows.dtype} {list(rows.shape)}"
        )
    if requests.dim() != 1 or lengths.shape != requests.shape:
        raise ValueError(
            f"requests and lengths must be [batch], got {list(requests.shape)}, {list(lengths.shape)}"
        )
    if home is not None and (home.dtype != torch.int32 or home.shape != (num_slots,)):
        raise ValueError(f"home must be int32 [{num_slots}], got {home.dtype} {list(home.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}")
    requests, lengths = requests.long().contiguous(), lengths.long().contiguous()
    on_host = rows.device.type == "cpu" and rows.stride(1) == 1
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
                    None if home is None else home.contiguous(),
                    num_slots,
                    -1 if window is None else window,
                    capacity=max(0, int(lengths.sum())),
                )
            )
    return RowPlan(*attention_reference.plan_rows(rows, requests, lengths, home, num_slots, window))
