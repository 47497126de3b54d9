# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one layer as paged attention reads them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache import native

if TYPE_CHECKING:
    from sglang_reasoncache.attention.rotation import KeyRotation
    from sglang_reasoncache.native.attention import NativeKv

#: C++ for host memory, PyTorch for what it does not take and as the reference.
BACKENDS = ("native", "torch")


class PagedKv:
    """A layer's pool, in the layout FlashInfer calls NHD.

    Made once for a pool; it keeps the buffers' addresses, so they must be the
    pool's own memory and not copies made for reading.

    Args:
        keys: ``[num_slots, kv_heads, k_dim]``, fp32, bf16, fp16, fp8 e4m3fn or e5m2, strided.
        values: ``[num_slots, kv_heads, v_dim]``, likewise and of the same dtype.
        rotation: The model's rotation of keys, None where no entry is ever moved.
        backend: One of :data:`BACKENDS`; None takes the first that can read these.

    Raises:
        ValueError: buffers of unlike or unsupported layout, a rotation that does
            not fit the keys, an unknown backend, or one that cannot read them.
        sglang_reasoncache.native.NativeUnavailable: ``backend`` is "native" and
            the C++ library cannot be had.
    """

    #: Which of :data:`BACKENDS` serves.
    backend: str

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: KeyRotation | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
            raise ValueError(
                "buffers must be [num_slots, heads, head_dim], K and V alike in the first two; got "
                f"K {list(keys.shape)}, V {list(values.shape)}"
            )
        if keys.dtype != values.dtype or keys.device != values.device:
            raise ValueError(
                f"K is {keys.dtype} on {keys.device}, V {values.dtype} on {values.device}"
            )
        if rotation is not None and (
            rotation.rotary_dim > keys.shape[2] or rotation.rotary_dim % 2
        ):
            raise ValueError(
                f"rotary_dim {rotation.rotary_dim} does not fit head_dim {keys.shape[2]}"
            )
        self.keys, self.values, self.rotation = keys, values, rotation
        self.native = _native(keys, values, rotation, backend)
        self.backend = "torch" if self.native is None else "native"

    @property
    def num_slots(self) -> int:
        return self.keys.shape[0]

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]


def threads_of_a_call(threads: int | None) -> int:
    """``threads``, or what PyTorch uses as far as this process may run on as many cores."""
    if threads is not None:
        return threads
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))


def check_shift(kv: PagedKv, shift: torch.Tensor | None) -> None:
    """Raises ValueError where moved entries could not be turned."""
    if shift is not None and kv.rotation is None:
        raise ValueError("the plan has moved entries, but the pool was given no rotation")


def _native(
    keys: torch.Tensor, values: torch.Tensor, rotation: KeyRotation | None, backend: str | None
) -> NativeKv | None:
    from sglang_reasoncache.native.attention import NativeKv
    from sglang_reasoncache.native.distance import DTYPES

    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return None
    readable = (
        keys.device.type == "cpu"
        and keys.dtype in DTYPES
        and keys.stride(2) == values.stride(2) == 1
    )
    if not readable:
        if backend is None:
            return None
        raise ValueError(
            f"native: keys {keys.dtype} on {keys.device} with strides {keys.stride()}; elements of "
            "a head must lie side by side in host memory"
        )
    try:
        return NativeKv(native.library(), keys, values, rotation)
    except native.NativeUnavailable:
        if backend is None:
            return None
        raise
