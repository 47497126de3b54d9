# SPDX-License-Identifier: Apache-2.0
"""Buffers of a KV pool, and which kernels read them."""

import torch
from torch import Tensor

from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.native.pool import NativePool

#: Type of a pool's device -> the backend that reads the pool: "native" (C++) or "triton".
BACKENDS = {"cpu": "native", "cuda": "triton"}
#: Dtypes that queries and gathered entries may have.
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PagedKv:
    """A layer's K and V buffers, in the layout that FlashInfer calls NHD.

    The buffers must be the pool's own memory, not copies, because their addresses are kept.

    Args:
        keys: ``[num_slots, kv_heads, k_dim]``, fp32, bf16, fp16, fp8 e4m3fn or e5m2. The last dimension is
            contiguous.
        values: ``[num_slots, kv_heads, v_dim]``, like ``keys``.
        rotation: The rotation of the layer's keys; None if keys are always used as cached.
        latent: Whether the layer caches one latent row per position (MLA): ``keys`` is the row's rotated part,
            ``values`` the rest. A query's first dims are multiplied by ``values``, the other dims by ``keys``.
        backend: "native" (C++) or "triton". None: as ``BACKENDS`` says for the device.

    Raises:
        ValueError: a device without kernels.
        sglang_reasoncache.native.NativeUnavailable: the C++ kernels cannot be compiled.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        rotation: KeyRotation | None = None,
        *,
        latent: bool = False,
        backend: str | None = None,
    ) -> None:
        self.latent = latent
        #: Dims of a query.
        self.query_dim = keys.shape[2] + (values.shape[2] if latent else 0)
        self.rotation = None if rotation is None else rotation.to(keys.device)
        self.keys = keys
        self.values = values
        self.num_slots, self.num_heads = keys.shape[:2]
        self.backend = backend or BACKENDS.get(keys.device.type, "")
        self.native: NativePool | None = None
        if self.backend == "native":
            self.native = NativePool([(keys, values)], self.rotation, latent)
        elif self.backend != "triton":
            raise ValueError(f"no attention kernels for {keys.device}")

    def check(self, shift: Tensor | None, dtype: torch.dtype) -> None:
        """Raises ValueError for shifts if the pool has no rotation, or if queries cannot have ``dtype``."""
        if shift is not None and self.rotation is None:
            raise ValueError("the plan has shifted entries, but the pool was given no rotation")
        if dtype not in QUERY_DTYPES:
            raise ValueError(f"{dtype} is not supported, {', '.join(map(str, QUERY_DTYPES))} are")


def read_rows(buffer: Tensor, slots: Tensor) -> Tensor:
    """The elements that a pool's buffer holds for ``slots``: fp32 ``[*slots.shape, heads, head_dim]``."""
    if buffer.dtype.itemsize == 1:
        # fp8 is gathered as bytes, because not every PyTorch operator supports fp8.
        return buffer.view(torch.uint8)[slots].view(buffer.dtype).float()
    return buffer[slots].float()


def read_keys(
    keys: Tensor, slots: Tensor, shift: Tensor | None, rotation: KeyRotation | None
) -> Tensor:
    """The keys in ``slots``, rotated by ``shift`` in PyTorch: fp32 ``[*slots.shape, heads, head_dim]``."""
    rows = read_rows(keys, slots)
    return rows if shift is None or rotation is None else turned(rows, shift, rotation)


def rotate_rows(kv: PagedKv, keys: Tensor, shift: Tensor) -> Tensor:
    """``keys`` ``[n, 1, dims]``, copied from a pool with a rotation, rotated by ``shift``, int32 ``[n]``."""
    assert kv.rotation is not None, "a pool whose keys can be rotated"
    if kv.backend == "triton":
        from sglang_reasoncache.kernels.turn_triton import turn

        return turn(keys, shift, kv.rotation)
    return turned(keys.float(), shift, kv.rotation).to(keys.dtype)


def turned(rows: Tensor, shift: Tensor, rotation: KeyRotation) -> Tensor:
    """Keys ``rows``, fp32 ``[..., heads, dims]``, rotated by ``shift`` ``[...]``."""
    # A key with shift 0 keeps its value: rotation would multiply by the sine 0, and inf * 0 is NaN.
    return torch.where((shift != 0)[..., None, None], rotation.rotate(rows, shift), rows)
