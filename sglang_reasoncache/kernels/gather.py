# SPDX-License-Identifier: Apache-2.0
"""Entries of a pool as contiguous K and V, keys rotated to where they are used."""

from __future__ import annotations

import torch

from sglang_reasoncache.kernels import attention_reference
from sglang_reasoncache.kernels.paged import PagedKv, check_shift
from sglang_reasoncache.kernels.pool import threads_of_a_call


def gather_kv(
    kv: PagedKv,
    kv_indices: torch.Tensor,
    shift: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy entries out, heads first, as attention over one request wants them.

    Args:
        kv_indices: int32 ``[count]``, slots.
        shift: int32 ``[count]``, positions by which to rotate each key; None: none.
        dtype: Of the result; moved keys are rotated in fp32 and rounded once.
        threads: Upper bound on CPU threads; None takes what PyTorch uses. For "native".

    Returns:
        ``[heads, count, k_dim]`` and ``[heads, count, v_dim]``, contiguous.

    Raises:
        ValueError: wrong dtype or shape; moved entries without a rotation; by "native" and
            "torch", a slot or shift out of range. "triton" does not look at values: such
            an entry comes out as zeros.
    """
    check_shift(kv, shift)
    if kv_indices.dtype != torch.int32 or kv_indices.dim() != 1:
        raise ValueError(f"kv_indices must be int32 [count], got {kv_indices.dtype}")
    if shift is not None and (shift.dtype != torch.int32 or shift.shape != kv_indices.shape):
        raise ValueError(f"shift must be int32 {list(kv_indices.shape)}, got {shift.dtype}")
    if kv.backend == "torch" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        found = attention_reference.gather_kv(kv.keys, kv.values, kv_indices, shift, kv.rotation)
        out_k, out_v = (side.transpose(0, 1).to(dtype).contiguous() for side in found)
        return out_k, out_v
    count = kv_indices.shape[0]
    device = kv.keys.device
    out_k = torch.empty((kv.num_heads, count, kv.keys.shape[2]), dtype=dtype, device=device)
    out_v = torch.empty((kv.num_heads, count, kv.values.shape[2]), dtype=dtype, device=device)
    kv_indices = kv_indices.contiguous()
    shift = None if shift is None else shift.contiguous()
    if kv.native is None:
        from sglang_reasoncache.kernels import gather_triton

        gather_triton.gather(kv.keys, kv.values, kv.rotation, kv_indices, shift, out_k, out_v)
    else:
        kv.native.gather(kv_indices, shift, out_k, out_v, threads_of_a_call(threads))
    return out_k, out_v
