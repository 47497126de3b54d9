# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one layer as paged attention reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.kernels.pool import check_pool, choose_backend
from sglang_reasoncache.native.pool import NativePool

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation

#: Dtypes of queries and of what is gathered.
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PagedKv:
    """A layer's pool, in the layout FlashInfer calls NHD.

    It keeps the buffers' addresses: they must be the pool's own memory, not copies.

    Args:
        keys: ``[num_slots, kv_heads, k_dim]``, fp32, bf16, fp16, fp8 e4m3fn or e5m2, strided.
        values: ``[num_slots, kv_heads, v_dim]``, likewise and of the same dtype.
        rotation: The model's rotation of keys, None where no entry is ever shifted.
        backend: See :func:`choose_backend`.

    Attributes:
        backend: Of ``pool.BACKENDS``, the one that reads.
        native: What its kernels take, if it is "native".

    Raises:
        ValueError: see :func:`check_pool` and :func:`choose_backend`.
        sglang_reasoncache.native.NativeUnavailable: likewise.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: KeyRotation | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        self.rotation = check_pool(keys, values, rotation)
        self.keys, self.values = keys, values
        self.backend = choose_backend(backend, keys, values)
        self.native: NativePool | None = None
        if self.backend == "native":
            self.native = NativePool([(keys, values)], self.rotation)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[0]

    @property
    def num_heads(self) -> int:
        return self.keys.shape[1]

    def check(self, shift: torch.Tensor | None, dtype: torch.dtype) -> None:
        """Raises ValueError for shifts without a rotation, or a query dtype that is not supported."""
        if shift is not None and self.rotation is None:
            raise ValueError("the plan has shifted entries, but the pool was given no rotation")
        if dtype not in QUERY_DTYPES:
            raise ValueError(f"{dtype} is not supported, {', '.join(map(str, QUERY_DTYPES))} are")
