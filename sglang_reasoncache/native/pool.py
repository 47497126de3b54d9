# SPDX-License-Identifier: Apache-2.0
"""A KV pool in host memory as the C++ kernels take it (``csrc/pool/pool.h``)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch

#: Pool dtypes; the index is the C++ enumerator ``reasoncache_element``.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

int64, int32, fp32, pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
_two = int64 * 2
_NO_MEMORY = 9
_MESSAGES = {
    1: "requests has an index outside the rows",
    2: "lengths has an entry below 0 or beyond a row's end",
    3: "a slot outside the pool",
    4: "dst_slots has a slot outside the pool",
    5: "src_slots has a slot outside the pool",
    6: "begin and end go beyond kv_indices",
    7: "shift has an entry beyond the rotary table",
    8: "sizes or dtypes that do not fit together",
}


class RotaryTable(Protocol):
    """Cosines and sines of whole positions, fp32 ``[positions, rotary_dim / 2]``."""

    cos: torch.Tensor
    sin: torch.Tensor
    rotary_dim: int
    is_neox: bool


def fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    """Fields of a C structure, from (type, names) in its order."""
    return [(name, kind) for kind, names in groups for name in names.split()]


class _Pool(ctypes.Structure):
    """``reasoncache_pool``."""

    _fields_ = fields(
        (pointer, "bases"),
        (int64, "num_layers num_slots num_heads"),
        (_two, "head_dim slot_stride head_stride"),
        (pointer, "cosines sines"),
        (int64, "table_rows rotary_dim"),
        (int32, "is_neox element"),
    )


class NativePool:
    """Layers of one layout, described once for many calls.

    Args:
        layers: Keys and values of each layer, ``[num_slots, heads, head_dim]`` in host memory,
            of a dtype of :data:`DTYPES`, elements of a head side by side.
        rotation: The model's rotation of keys, fp32 in host memory; None: as cached.

    Attributes:
        address: Of the C structure.
    """

    def __init__(
        self,
        layers: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rotation: RotaryTable | None,
    ) -> None:
        keys, values = layers[0]
        buffers = [buffer for layer in layers for buffer in layer]
        bases = (pointer * len(buffers))(*(buffer.data_ptr() for buffer in buffers))
        struct = _Pool(
            bases=ctypes.addressof(bases),
            num_layers=len(layers),
            num_slots=keys.shape[0],
            num_heads=keys.shape[1],
            head_dim=(keys.shape[2], values.shape[2]),
            slot_stride=(keys.stride(0), values.stride(0)),
            head_stride=(keys.stride(1), values.stride(1)),
            element=DTYPES.index(keys.dtype),
        )
        if rotation is not None:
            struct.cosines, struct.sines = rotation.cos.data_ptr(), rotation.sin.data_ptr()
            struct.table_rows, struct.rotary_dim = len(rotation.cos), rotation.rotary_dim
            struct.is_neox = rotation.is_neox
        # What the structure points at has to live as long as it does.
        self._alive = buffers, bases, struct, rotation
        self.address = pointer(ctypes.addressof(struct))


def address_of(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def cpu_threads() -> int:
    """What PyTorch uses, as far as this process may run on as many cores."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


def check_status(status: int, what: str) -> None:
    """Raises what a ``reasoncache_status`` stands for."""
    if status == _NO_MEMORY:
        raise MemoryError(what)
    if status:
        raise ValueError(f"{what}: {_MESSAGES.get(status, f'native status {status}')}")
