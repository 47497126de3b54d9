# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one layer as paged attention reads them."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache import native
from sglang_reasoncache.kernels.pool import check_rotation, check_sides

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation
    from sglang_reasoncache.native.attention import NativeKv

#: C++ for host memory, Triton for CUDA devices, PyTorch for what these do not take and as
#: the reference.
BACKENDS = ("native", "triton", "torch")


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
        check_sides(keys, values)
        if keys.dtype != values.dtype or keys.device != values.device:
            raise ValueError(
                f"K is {keys.dtype} on {keys.device}, V {values.dtype} on {values.device}"
            )
        check_rotation(rotation, keys.shape[2])
        if rotation is not None and rotation.cos.device != keys.device:
            rotation = _on(rotation, keys.device)
        self.keys, self.values, self.rotation = keys, values, rotation
        self.backend = _choose(keys, values, backend)
        self.native: NativeKv | None = None
        if self.backend == "native":
            from sglang_reasoncache.native.attention import NativeKv

            self.native = NativeKv(native.library(), keys, values, rotation)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[0]

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]


def check_shift(kv: PagedKv, shift: torch.Tensor | None) -> None:
    """Raises ValueError where moved entries could not be rotated."""
    if shift is not None and kv.rotation is None:
        raise ValueError("the plan has moved entries, but the pool was given no rotation")


@functools.lru_cache(maxsize=4)
def _on(rotation: KeyRotation, device: torch.device) -> KeyRotation:
    """The same rotation there; all layers share one copy of its table."""
    there = copy.copy(rotation)
    there.cos, there.sin = rotation.cos.to(device), rotation.sin.to(device)
    return there


def _choose(keys: torch.Tensor, values: torch.Tensor, backend: str | None) -> str:
    """The backend asked for, if it can read these, or the first that can."""
    from sglang_reasoncache.native.distance import DTYPES

    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "torch":
        return backend
    readable = keys.dtype in DTYPES and keys.stride(2) == values.stride(2) == 1
    on_host = keys.device.type == "cpu"
    if backend is not None and (not readable or (backend == "native" and not on_host)):
        place = " in host memory" if backend == "native" else ""
        raise ValueError(
            f"{backend}: keys {keys.dtype} on {keys.device} with strides {keys.stride()}; elements "
            f"of a head must lie side by side{place}"
        )
    try:
        if backend == "native" or (backend is None and readable and on_host):
            native.library()
            return "native"
        if backend == "triton" or (backend is None and readable and keys.device.type == "cuda"):
            from sglang_reasoncache.kernels import decode_triton, gather_triton  # noqa: F401

            return "triton"
    except native.NativeUnavailable:
        if backend is not None:
            raise
    except ImportError as error:
        if backend is not None:
            raise ValueError(f"triton: {error}") from error
    return "torch"
