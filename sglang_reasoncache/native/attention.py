# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels of ``csrc/attention`` on tensors in host memory.

Callers check dtypes and shapes; the kernels check every slot, length and shift before they read.
"""

from __future__ import annotations

import ctypes

import torch

from sglang_reasoncache.native.pool import (
    DTYPES,
    NativePool,
    RotaryTable,
    address_of,
    check_status,
    fields,
    fp32,
    int32,
    int64,
    pointer,
)


class _PlanCall(ctypes.Structure):
    """``reasoncache_plan_call``."""

    _fields_ = fields(
        (pointer, "rows"),
        (int64, "num_rows row_stride width"),
        (pointer, "requests lengths"),
        (int64, "batch"),
        (pointer, "cached_at"),
        (int64, "num_slots"),
        (pointer, "kv_indptr kv_indices shift"),
        (int64, "capacity"),
        (int32, "is_shifted"),
    )


class _DecodeCall(ctypes.Structure):
    """``reasoncache_decode_call``."""

    _fields_ = fields(
        (pointer, "query out"),
        (int64, "batch num_heads q_row_stride q_head_stride out_row_stride out_head_stride"),
        (pointer, "begin end kv_indices shift"),
        (int64, "total"),
        (pointer, "sinks"),
        (fp32, "scale logit_cap"),
        (int32, "element threads"),
        (pointer, "weights"),
    )


class _GatherCall(ctypes.Structure):
    """``reasoncache_gather_call``."""

    _fields_ = fields(
        (pointer, "kv_indices shift"),
        (int64, "count"),
        (pointer, "out_k out_v"),
        (int32, "element threads"),
    )


def native_plan(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None,
    num_slots: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`sglang_reasoncache.kernels.plan.plan_rows`; all contiguous, the second and third
    int64.

    Raises:
        ValueError: a request, length or slot out of range.
    """
    batch, capacity = len(requests), max(0, int(lengths.sum()))
    kv_indptr = torch.empty(batch + 1, dtype=torch.int32)
    kv_indices = torch.empty(capacity, dtype=torch.int32)
    shift = None if cached_at is None else torch.empty_like(kv_indices)
    call = _PlanCall(
        rows=rows.data_ptr(),
        num_rows=rows.shape[0],
        row_stride=rows.stride(0),
        width=rows.shape[1],
        requests=requests.data_ptr(),
        lengths=lengths.data_ptr(),
        batch=batch,
        cached_at=address_of(cached_at),
        num_slots=num_slots,
        kv_indptr=kv_indptr.data_ptr(),
        kv_indices=kv_indices.data_ptr(),
        shift=address_of(shift),
        capacity=capacity,
    )
    check_status(library.reasoncache_plan(ctypes.byref(call)), "plan")
    total = int(kv_indptr[-1])
    return (
        kv_indptr,
        kv_indices[:total],
        shift[:total] if shift is not None and call.is_shifted else None,
    )


class NativeKv:
    """Keys and values of one layer; see :class:`NativePool` for the arguments."""

    def __init__(
        self,
        library: ctypes.CDLL,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: RotaryTable | None,
    ) -> None:
        self._library = library
        self._pool = NativePool([(keys, values)], rotation)

    def decode(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        begin: torch.Tensor,
        end: torch.Tensor,
        kv_indices: torch.Tensor,
        shift: torch.Tensor | None,
        sinks: torch.Tensor | None,
        scale: float,
        logit_cap: float,
        weights: torch.Tensor | None,
        threads: int,
    ) -> None:
        """See :func:`sglang_reasoncache.kernels.decode.decode_attention`.

        Raises:
            ValueError: a slot, range or shift out of bounds; nothing has been read then.
        """
        call = _DecodeCall(
            query.data_ptr(),
            out.data_ptr(),
            query.shape[0],
            query.shape[1],
            *query.stride()[:2],
            *out.stride()[:2],
            begin.data_ptr(),
            end.data_ptr(),
            kv_indices.data_ptr(),
            address_of(shift),
            kv_indices.shape[0],
            address_of(sinks),
            scale,
            logit_cap,
            DTYPES.index(query.dtype),
            threads,
            address_of(weights),
        )
        check_status(
            self._library.reasoncache_decode(self._pool.address, ctypes.byref(call)), "decode"
        )

    def gather(
        self,
        kv_indices: torch.Tensor,
        shift: torch.Tensor | None,
        out_k: torch.Tensor,
        out_v: torch.Tensor,
        threads: int,
    ) -> None:
        """See :func:`sglang_reasoncache.kernels.gather.gather_kv`.

        Raises:
            ValueError: a slot or shift out of bounds; nothing has been read then.
        """
        call = _GatherCall(
            kv_indices.data_ptr(),
            address_of(shift),
            kv_indices.shape[0],
            out_k.data_ptr(),
            out_v.data_ptr(),
            DTYPES.index(out_k.dtype),
            threads,
        )
        check_status(
            self._library.reasoncache_gather(self._pool.address, ctypes.byref(call)), "gather"
        )
