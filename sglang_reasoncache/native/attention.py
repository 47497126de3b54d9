# SPDX-License-Identifier: Apache-2.0
"""The C++ kernels of ``csrc/attention`` on tensors in host memory.

Arguments have been checked by ``sglang_reasoncache.kernels``, but for values:
the kernels look at every slot, length and shift before they read anything.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.native.distance import DTYPES

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: Dtypes of queries and outputs.
QUERY_DTYPES = DTYPES[:3]

_OK, _BAD_ROW, _BAD_LEN, _BAD_SLOT, _BAD_RANGE, _BAD_SHIFT, _BAD_CALL, _NO_MEMORY = range(8)
_MESSAGES = {
    _BAD_ROW: "requests has an index outside the rows",
    _BAD_LEN: "lengths has an entry below 0, beyond a row's end, or beyond capacity",
    _BAD_SLOT: "a slot outside the pool",
    _BAD_RANGE: "begin and end go beyond kv_indices",
    _BAD_SHIFT: "shift has an entry beyond the rotary table",
    _BAD_CALL: "sizes or dtypes that do not fit together",
}

_int64, _int32, _float, _pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class _PlanCall(ctypes.Structure):
    """``reasoncache_plan_call``."""

    _fields_ = (
        ("rows", _pointer),
        ("num_rows", _int64),
        ("row_stride", _int64),
        ("width", _int64),
        ("requests", _pointer),
        ("lengths", _pointer),
        ("batch", _int64),
        ("window", _int64),
        ("cached_at", _pointer),
        ("num_slots", _int64),
        ("kv_indptr", _pointer),
        ("kv_indices", _pointer),
        ("shift", _pointer),
        ("capacity", _int64),
        ("together", _int32),
        ("is_shifted", _int32),
    )


class _Kv(ctypes.Structure):
    """``reasoncache_kv``."""

    _fields_ = (
        ("keys", _pointer),
        ("values", _pointer),
        ("num_slots", _int64),
        ("num_heads", _int64),
        ("k_dim", _int64),
        ("v_dim", _int64),
        ("k_slot_stride", _int64),
        ("k_head_stride", _int64),
        ("v_slot_stride", _int64),
        ("v_head_stride", _int64),
        ("cosines", _pointer),
        ("sines", _pointer),
        ("table_rows", _int64),
        ("rotary_dim", _int64),
        ("is_neox", _int32),
        ("element", _int32),
    )


class _DecodeCall(ctypes.Structure):
    """``reasoncache_decode_call``."""

    _fields_ = (
        ("query", _pointer),
        ("out", _pointer),
        ("lse", _pointer),
        ("batch", _int64),
        ("num_heads", _int64),
        ("q_row_stride", _int64),
        ("q_head_stride", _int64),
        ("out_row_stride", _int64),
        ("out_head_stride", _int64),
        ("begin", _pointer),
        ("end", _pointer),
        ("kv_indices", _pointer),
        ("shift", _pointer),
        ("total", _int64),
        ("sinks", _pointer),
        ("scale", _float),
        ("logit_cap", _float),
        ("element", _int32),
        ("threads", _int32),
        ("weights", _pointer),
    )


class _GatherCall(ctypes.Structure):
    """``reasoncache_gather_call``."""

    _fields_ = (
        ("kv_indices", _pointer),
        ("shift", _pointer),
        ("count", _int64),
        ("out_k", _pointer),
        ("out_v", _pointer),
        ("element", _int32),
        ("threads", _int32),
    )


def native_plan(
    library: ctypes.CDLL,
    rows: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    cached_at: torch.Tensor | None,
    num_slots: int,
    window: int,
    capacity: int,
    together: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See :func:`sglang_reasoncache.kernels.plan.plan_rows`.

    Args:
        requests, lengths: int64, contiguous.
        window: below 0 for all positions.
        capacity: at least the number of entries.

    Raises:
        ValueError: a request, length or slot out of range.
    """
    batch = requests.shape[0]
    kv_indptr = torch.empty(batch + 1, dtype=torch.int32)
    kv_indices = torch.empty(capacity, dtype=torch.int32)
    shift = None if cached_at is None else torch.empty(capacity, dtype=torch.int32)
    call = _PlanCall(
        rows=rows.data_ptr(),
        num_rows=rows.shape[0],
        row_stride=rows.stride(0),
        width=rows.shape[1],
        requests=requests.data_ptr(),
        lengths=lengths.data_ptr(),
        batch=batch,
        window=window,
        cached_at=None if cached_at is None else cached_at.data_ptr(),
        num_slots=num_slots,
        kv_indptr=kv_indptr.data_ptr(),
        kv_indices=kv_indices.data_ptr(),
        shift=None if shift is None else shift.data_ptr(),
        capacity=capacity,
        together=together,
    )
    _check(library.reasoncache_plan(ctypes.byref(call)), "plan")
    total = int(kv_indptr[-1])
    shifted = shift is not None and call.is_shifted
    return kv_indptr, kv_indices[:total], shift[:total] if shifted and shift is not None else None


class NativeKv:
    """Keys and values of one layer, described once for many calls; see ``PagedKv``."""

    def __init__(
        self,
        library: ctypes.CDLL,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: KeyRotation | None,
    ) -> None:
        self._library = library
        self._struct = _Kv(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            num_slots=keys.shape[0],
            num_heads=keys.shape[1],
            k_dim=keys.shape[2],
            v_dim=values.shape[2],
            k_slot_stride=keys.stride(0),
            k_head_stride=keys.stride(1),
            v_slot_stride=values.stride(0),
            v_head_stride=values.stride(1),
            element=DTYPES.index(keys.dtype),
        )
        # What the structure points at has to live as long as it does.
        self._alive: list[object] = [keys, values]
        if rotation is not None:
            tables = (rotation.cos, rotation.sin)
            self._alive += tables
            self._struct.cosines, self._struct.sines = (table.data_ptr() for table in tables)
            self._struct.table_rows = rotation.cos.shape[0]
            self._struct.rotary_dim = rotation.rotary_dim
            self._struct.is_neox = rotation.is_neox
        self._address = ctypes.addressof(self._struct)

    def decode(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        begin: torch.Tensor,
        end: torch.Tensor,
        kv_indices: torch.Tensor,
        shift: torch.Tensor | None,
        sinks: torch.Tensor | None,
        scale: float,
        logit_cap: float,
        threads: int,
        weights: torch.Tensor | None = None,
    ) -> None:
        """See :func:`sglang_reasoncache.kernels.decode.decode_attention`.

        Raises:
            ValueError: a slot, range or shift out of bounds; nothing has been read then.
        """
        q_strides, out_strides = query.stride(), out.stride()
        call = _DecodeCall(
            query.data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            query.shape[0],
            query.shape[1],
            q_strides[0],
            q_strides[1],
            out_strides[0],
            out_strides[1],
            begin.data_ptr(),
            end.data_ptr(),
            kv_indices.data_ptr(),
            None if shift is None else shift.data_ptr(),
            kv_indices.shape[0],
            None if sinks is None else sinks.data_ptr(),
            scale,
            logit_cap,
            DTYPES.index(query.dtype),
            threads,
            None if weights is None else weights.data_ptr(),
        )
        _check(
            self._library.reasoncache_decode(_pointer(self._address), ctypes.byref(call)), "decode"
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
            None if shift is None else shift.data_ptr(),
            kv_indices.shape[0],
            out_k.data_ptr(),
            out_v.data_ptr(),
            DTYPES.index(out_k.dtype),
            threads,
        )
        _check(
            self._library.reasoncache_gather(_pointer(self._address), ctypes.byref(call)), "gather"
        )


def _check(status: int, what: str) -> None:
    if status == _OK:
        return
    if status == _NO_MEMORY:
        raise MemoryError(f"paged attention: {what}")
    raise ValueError(f"{what}: {_MESSAGES.get(status, f'native status {status}')}")
