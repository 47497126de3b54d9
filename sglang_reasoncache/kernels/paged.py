# SPDX-License-Identifier: Apache-2.0
"""Buffers of a KV pool as the operations read them, and which backend does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sglang_reasoncache import native
from sglang_reasoncache.native.pool import DTYPES, NativePool

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: C++ for host memory, Triton for CUDA devices, PyTorch for what neither reads, as the reference.
BACKENDS = ("native", "triton", "torch")
#: Dtypes of queries and of what is gathered.
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PagedKv:
    """A layer's pool, in the layout FlashInfer calls NHD.

    It keeps the buffers' addresses: they must be the pool's own memory, not copies.

    Args:
        keys: ``[num_slots, kv_heads, k_dim]``, fp32, bf16, fp16, fp8 e4m3fn or e5m2, strided.
        values: ``[num_slots, kv_heads, v_dim]``, of the dtype of ``keys``, strided.
        rotation: The model's rotation of keys, None where no entry is ever shifted.
        backend: See :func:`choose_backend`; the attribute is the one that reads.

    Raises:
        ValueError: see :func:`check_pool` and :func:`choose_backend`.
        sglang_reasoncache.native.NativeUnavailable: see :func:`choose_backend`.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        rotation: KeyRotation | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        self.rotation = check_pool(keys, values, rotation)
        self.keys, self.values = keys, values
        self.num_slots, self.num_heads = keys.shape[:2]
        self.backend = choose_backend(backend, keys, values)
        self.native: NativePool | None = None
        if self.backend == "native":
            self.native = NativePool([(keys, values)], self.rotation)

    def check(self, shift: Tensor | None, dtype: torch.dtype) -> None:
        """Raises ValueError for shifts without a rotation, or a query dtype that is not supported."""
        if shift is not None and self.rotation is None:
            raise ValueError("the plan has shifted entries, but the pool was given no rotation")
        if dtype not in QUERY_DTYPES:
            raise ValueError(f"{dtype} is not supported, {', '.join(map(str, QUERY_DTYPES))} are")


def check_pool(keys: Tensor, values: Tensor, rotation: KeyRotation | None) -> KeyRotation | None:
    """``rotation`` on the pool's device.

    Raises:
        ValueError: buffers that are not ``[num_slots, heads, head_dim]``, alike but for the last,
            or a rotation of more dimensions than a key has, or of an odd number.
    """
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            "buffers must be [num_slots, heads, head_dim], K and V alike in the first two; got "
            f"K {list(keys.shape)}, V {list(values.shape)}"
        )
    if keys.dtype != values.dtype or keys.device != values.device:
        raise ValueError(f"K is {keys.dtype} on {keys.device}, V {values.dtype} on {values.device}")
    if rotation is None:
        return None
    if rotation.rotary_dim > keys.shape[2] or rotation.rotary_dim % 2:
        raise ValueError(f"rotary_dim {rotation.rotary_dim} does not fit head_dim {keys.shape[2]}")
    return rotation.to(keys.device)


def choose_backend(asked: str | None, keys: Tensor, values: Tensor) -> str:
    """The one of :data:`BACKENDS` asked for, or the first that can read these buffers.

    Raises:
        ValueError: an unknown backend, or one that cannot read them.
        sglang_reasoncache.native.NativeUnavailable: "native" is asked for without a library.
    """
    if asked not in (None, *BACKENDS):
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {asked!r}")
    device = keys.device.type
    readable = keys.dtype in DTYPES and keys.stride(2) == values.stride(2) == 1
    if asked == "torch" or (asked is None and not readable):
        return "torch"
    if not readable or (asked == "native" and device != "cpu"):
        place = " in host memory" if asked == "native" else ""
        raise ValueError(
            f"{asked}: {keys.dtype} on {keys.device} with strides {keys.stride()}; elements of a "
            f"head must lie side by side{place}"
        )
    chosen = asked or {"cpu": "native", "cuda": "triton"}.get(device, "torch")
    try:
        if chosen == "native":
            native.library()
        elif chosen == "triton":
            from sglang_reasoncache.kernels import decode_triton  # noqa: F401
    except (native.NativeUnavailable, ImportError) as error:
        if asked is None:
            return "torch"
        raise error if chosen == "native" else ValueError(f"triton: {error}") from error
    return chosen


def read_rows(buffer: Tensor, slots: Tensor) -> Tensor:
    """fp32 ``[*slots.shape, heads, head_dim]``."""
    if buffer.dtype.itemsize == 1:
        # Not every PyTorch operator knows fp8; its bytes can always be gathered.
        return buffer.view(torch.uint8)[slots].view(buffer.dtype).float()
    return buffer[slots].float()


def read_keys(
    keys: Tensor, slots: Tensor, shift: Tensor | None, rotation: KeyRotation | None
) -> Tensor:
    """fp32 keys ``[*slots.shape, heads, head_dim]``, rotated by ``shift`` in PyTorch."""
    found = read_rows(keys, slots)
    if shift is None or rotation is None:
        return found
    # Unshifted entries stay as they are even if they are not finite: inf * 0 is NaN.
    return torch.where((shift != 0)[..., None, None], rotation.rotate(found, shift), found)
