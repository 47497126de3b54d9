# SPDX-License-Identifier: Apache-2.0
"""What all kernels ask of a pool's buffers and of the calls that read them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.rotation import KeyRotation


def check_sides(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises ValueError unless both are ``[num_slots, heads, head_dim]``, alike in the first two."""
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            "buffers must be [num_slots, heads, head_dim], K and V alike in the first two; got "
            f"K {list(keys.shape)}, V {list(values.shape)}"
        )


def check_rotation(rotation: KeyRotation | None, head_dim: int) -> None:
    """Raises ValueError where a rotation turns more dimensions than a key has, or an odd number."""
    if rotation is not None and (rotation.rotary_dim > head_dim or rotation.rotary_dim % 2):
        raise ValueError(f"rotary_dim {rotation.rotary_dim} does not fit head_dim {head_dim}")


def read_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """fp32 ``[*slots.shape, heads, head_dim]``."""
    if buffer.dtype.itemsize == 1:
        # Not every PyTorch operator knows fp8; its bytes can always be gathered.
        return buffer.view(torch.uint8)[slots].view(buffer.dtype).float()
    return buffer[slots].float()


def threads_of_a_call(threads: int | None) -> int:
    """``threads``, or what PyTorch uses as far as this process may run on as many cores."""
    if threads is not None:
        return threads
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)))
