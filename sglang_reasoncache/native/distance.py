# SPDX-License-Identifier: Apache-2.0
"""The C++ kernel of ``csrc/distance`` on tensors in host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: Pool dtypes; the index is the C++ enumerator ``reasoncache_element``.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

_SQUARES, _MOMENTS = 0, 1
_BAD_DST, _BAD_SRC, _BAD_SHIFT, _BAD_CALL, _NO_MEMORY = 1, 2, 3, 4, 5


class _Pool(ctypes.Structure):
    """``reasoncache_distance_pool``."""

    _fields_ = (
        ("bases", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64 * 2),
        ("slot_stride", ctypes.c_int64 * 2),
        ("head_stride", ctypes.c_int64 * 2),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("table_rows", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("is_neox", ctypes.c_int32),
        ("element", ctypes.c_int32),
    )


class NativeDistance:
    """The sums of :class:`~sglang_reasoncache.kernels.distance.DistanceKernel` by C++.

    A call reads both blocks once and takes no memory but its result. ctypes
    releases the interpreter lock meanwhile; calls may run concurrently.

    Args:
        library: From :func:`sglang_reasoncache.native.library`.
        layers: Key and value buffer of every layer, ``[num_slots, heads, head_dim]``
            in host memory, dtype one of :data:`DTYPES`, elements of a head side
            by side; all keys laid out alike, and all values.
        rotation: The model's rotation, None to compare as cached only.
        threads: Upper bound on threads; small calls use one.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rotation: KeyRotation | None,
        threads: int,
    ) -> None:
        self._call = library.reasoncache_distance
        self._call.restype = ctypes.c_int32
        self._call.argtypes = (
            *(ctypes.c_void_p,) * 4,
            *(ctypes.c_int64,) * 2,
            *(ctypes.c_int32,) * 2,
            ctypes.c_void_p,
        )
        self._num_layers = len(layers)
        self._threads = threads
        buffers = [buffer for layer in layers for buffer in layer]
        bases = (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
        pool = _Pool(
            bases=ctypes.addressof(bases),
            num_layers=len(layers),
            num_slots=buffers[0].shape[0],
            num_heads=buffers[0].shape[1],
            head_dim=tuple(buffer.shape[2] for buffer in layers[0]),
            slot_stride=tuple(buffer.stride(0) for buffer in layers[0]),
            head_stride=tuple(buffer.stride(1) for buffer in layers[0]),
            element=DTYPES.index(buffers[0].dtype),
        )
        # What the structure points at has to live as long as it does.
        self._alive: list[object] = [buffers, bases, pool]
        if rotation is not None:
            cosines, sines = (t.float().cpu().contiguous() for t in (rotation.cos, rotation.sin))
            self._alive += (cosines, sines)
            pool.cosines, pool.sines = cosines.data_ptr(), sines.data_ptr()
            pool.table_rows = cosines.shape[0]
            pool.rotary_dim = rotation.rotary_dim
            pool.is_neox = rotation.is_neox
        self._pool = pool
        self._address = ctypes.addressof(pool)

    def squares(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """fp64 ``[pairs, num_layers, 2]``; arguments checked but for their values.

        Raises:
            ValueError: a slot or shift out of range; nothing has been read then.
        """
        pairs, block = dst_slots.shape
        out = torch.empty((pairs, self._num_layers, 2), dtype=torch.float64)
        self._run(dst_slots, src_slots, shift, pairs, block, _SQUARES, out)
        return out

    def moments(
        self, dst_slots: torch.Tensor, src_slots: torch.Tensor, shift: torch.Tensor | None
    ) -> torch.Tensor:
        """fp64 ``[pairs, num_layers, 2, 3]``; arguments checked but for their values.

        Raises:
            ValueError: a slot or shift out of range; nothing has been read then.
        """
        pairs, block = dst_slots.shape
        out = torch.empty((pairs, self._num_layers, 2, 3), dtype=torch.float64)
        self._run(dst_slots, src_slots, shift, pairs, block, _MOMENTS, out)
        return out

    def _run(
        self,
        dst_slots: torch.Tensor,
        src_slots: torch.Tensor,
        shift: torch.Tensor | None,
        pairs: int,
        block: int,
        what: int,
        out: torch.Tensor,
    ) -> None:
        dst_slots, src_slots = dst_slots.contiguous(), src_slots.contiguous()
        if shift is not None:
            shift = shift.contiguous()
        status = self._call(
            self._address,
            dst_slots.data_ptr(),
            src_slots.data_ptr(),
            None if shift is None else shift.data_ptr(),
            pairs,
            block,
            what,
            self._threads,
            out.data_ptr(),
        )
        if status:
            raise self._error(status)

    def _error(self, status: int) -> Exception:
        if status in (_BAD_DST, _BAD_SRC):
            name = "dst_slots" if status == _BAD_DST else "src_slots"
            return ValueError(f"{name} has a slot outside the pool of {self._pool.num_slots} slots")
        if status == _BAD_SHIFT:
            rows = self._pool.table_rows
            return ValueError(f"shift has an entry beyond the rotary table of {rows} positions")
        if status == _NO_MEMORY:
            return MemoryError("KV distance")
        return RuntimeError(f"KV distance: native status {status}")
