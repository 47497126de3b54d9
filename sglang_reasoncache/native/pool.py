# SPDX-License-Identifier: Apache-2.0
"""Passes a KV pool in host memory to the C++ kernels (``csrc/pool/pool.h``)."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_reasoncache import native

#: Dtypes of a pool. The index of a dtype is its value in the C++ enum ``reasoncache_element``.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

_int64 = ctypes.c_int64
_int32 = ctypes.c_int32
_pointer = ctypes.c_void_p
_KINDS = {"p": _pointer, "q": _int64, "f": ctypes.c_float}
#: C function -> the kinds of its arguments: p is a pointer, q an int64, f an fp32.
_SIGNATURES = {
    "plan": "pqqqppqqpqpppqppppp",
    "decode": "pppqqqqppppqpppqpffqq",
    "gather": "pppqppqq",
    "distance": "ppppqqqp",
}
#: Types of arguments that are passed on as they are. All other arguments are tensors, passed by address.
_PLAIN = {int, float, bool, type(None), type(ctypes.byref(_int32()))}
_NO_MEMORY = 9
_MESSAGES = {
    1: "requests has an index outside the rows",
    2: "lengths has an entry below 0 or beyond a row's end",
    3: "a slot outside the pool",
    4: "dst_slots has a slot outside the pool",
    5: "src_slots has a slot outside the pool",
    6: "begin and end go beyond kv_indices, or tile_ptr beyond the rotations",
    7: "shift has an entry beyond the rotary table",
    8: "sizes or dtypes that do not fit together",
}


class _Pool(ctypes.Structure):
    """The C++ struct ``reasoncache_pool``."""

    _fields_ = (
        ("bases", _pointer),
        ("num_layers", _int64),
        ("num_slots", _int64),
        ("num_heads", _int64),
        ("head_dim", _int64 * 2),
        ("slot_stride", _int64 * 2),
        ("head_stride", _int64 * 2),
        ("cosines", _pointer),
        ("sines", _pointer),
        ("table_rows", _int64),
        ("rotary_dim", _int64),
        ("is_neox", _int32),
        ("element", _int32),
        ("is_latent", _int32),
    )


class NativePool:
    """The KV buffers of layers with the same layout, described to C++ once for many calls.

    Buffers are ``[num_slots, heads, head_dim]`` in host memory, of a dtype of :data:`DTYPES`, with a
    contiguous last dimension. ``rotation``: a ``KeyRotation`` in host memory; None to read keys as cached.
    ``latent``: see ``PagedKv``. Raises NativeUnavailable if there is no library.
    """

    def __init__(
        self, layers: Sequence[tuple[Tensor, Tensor]], rotation: Any, latent: bool = False
    ) -> None:
        keys, values = layers[0]
        buffers = [buffer for layer in layers for buffer in layer]
        bases = (_pointer * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
        struct = _Pool(
            bases=ctypes.addressof(bases),
            num_layers=len(layers),
            num_slots=keys.shape[0],
            num_heads=keys.shape[1],
            head_dim=(keys.shape[2], values.shape[2]),
            slot_stride=(keys.stride(0), values.stride(0)),
            head_stride=(keys.stride(1), values.stride(1)),
            element=DTYPES.index(keys.dtype),
            is_latent=latent,
        )
        if rotation is not None:
            struct.cosines = rotation.cos.data_ptr()
            struct.sines = rotation.sin.data_ptr()
            struct.table_rows = len(rotation.cos)
            struct.rotary_dim = rotation.rotary_dim
            struct.is_neox = rotation.is_neox
        # What the structure points at has to live as long as the structure.
        self._alive = buffers, bases, struct, rotation
        self._struct = ctypes.byref(struct)
        self._num_layers = len(layers)
        self._library = native.library()

    def call(self, name: str, *arguments: Any) -> None:
        """Calls ``reasoncache_NAME(pool, *arguments)``; see :func:`call`."""
        call(self._library, name, self._struct, *arguments)

    def distance(self, dst: Tensor, src: Tensor, shift: Tensor | None) -> Tensor:
        """Computes ``kernels.distance.DistanceKernel.squares`` in C++. All tensors must be contiguous."""
        pairs, block = dst.shape
        out = torch.empty((pairs, self._num_layers, 2), dtype=torch.float64)
        self.call("distance", dst, src, shift, pairs, block, cpu_threads(), out)
        return out


def call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Calls ``reasoncache_NAME(*arguments)``, see :data:`_SIGNATURES`. Pointers are tensors, ``byref`` or None.

    Callers check dtypes and shapes. The kernels check slots, lengths, ranges and shifts before they use
    them. Raises ValueError if one of these is out of bounds, MemoryError if memory runs out.
    """
    function = getattr(library, "reasoncache_" + name)
    if function.argtypes is None:
        function.argtypes = [_KINDS[kind] for kind in _SIGNATURES[name]]
    status = function(*[x if type(x) in _PLAIN else x.data_ptr() for x in arguments])
    if status == _NO_MEMORY:
        raise MemoryError(name)
    if status:
        raise ValueError(f"{name}: {_MESSAGES.get(status, f'native status {status}')}")


def cpu_threads() -> int:
    """Number of PyTorch's threads, but at most the number of cores that this process may run on."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
