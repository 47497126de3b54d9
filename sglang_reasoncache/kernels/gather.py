# SPDX-License-Identifier: Apache-2.0
"""Entries of a pool as contiguous K and V, keys rotated to where they are used."""

from __future__ import annotations

import torch

from sglang_reasoncache.kernels import reference
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.native.pool import DTYPES, cpu_threads


def gather_kv(
    kv: PagedKv, kv_indices: torch.Tensor, shift: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy entries out, heads first, as attention over one request reads them.

    Args:
        kv_indices: int32 ``[count]``, slots.
        shift: int32 ``[count]``, positions by which to rotate each key; None: none.
        dtype: Of the result, fp32, bf16 or fp16; keys are rotated in fp32 and rounded once.

    Returns:
        ``[heads, count, k_dim]`` and ``[heads, count, v_dim]``, contiguous.

    Raises:
        ValueError: as :func:`decode_attention`; "triton" gives zeros for what is out of range.
    """
    kv.check(shift, dtype)
    if kv_indices.dtype != torch.int32 or kv_indices.dim() != 1:
        raise ValueError(f"kv_indices must be int32 [count], got {kv_indices.dtype}")
    if shift is not None and (shift.dtype != torch.int32 or shift.shape != kv_indices.shape):
        raise ValueError(f"shift must be int32 {list(kv_indices.shape)}, got {shift.dtype}")
    if kv.backend == "torch":
        found = reference.gather(kv, kv_indices, shift)
        out_k, out_v = (side.transpose(0, 1).to(dtype).contiguous() for side in found)
        return out_k, out_v
    kv_indices = kv_indices.contiguous()
    shift = None if shift is None else shift.contiguous()
    shape = kv.num_heads, len(kv_indices)
    out_k = kv.keys.new_empty((*shape, kv.keys.shape[2]), dtype=dtype)
    out_v = kv.keys.new_empty((*shape, kv.values.shape[2]), dtype=dtype)
    if kv.native is not None:
        entries = kv_indices, shift, len(kv_indices)
        kv.native.call("gather", *entries, out_k, out_v, DTYPES.index(dtype), cpu_threads())
    else:
        from sglang_reasoncache.kernels import gather_triton

        gather_triton.gather(kv, kv_indices, shift, out_k, out_v)
    return out_k, out_v
