# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang's own prefills of latent attention (MLA) read shifted slots.

These prefills fetch the latent rows of a prefix from the pool and expand them to keys and values of heads,
which dense kernels read: for long prefixes much less work than attention over the rows themselves. What they
fetch has the dims that the rotary embedding rotated. We rotate these to the positions where they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache import compat

if TYPE_CHECKING:
    from sglang_reasoncache.attention.paged import PagedAttention

#: SGLang's backends that can expand the rows of a prefix.
BACKENDS = ("flashinfer", "fa3", "trtllm_mla")
#: The fewest new tokens of a request for which its prefix is expanded. By operations it pays for DeepSeek from
#: 170 on; our kernels reach a smaller part of a GPU's speed. No GPU has checked that.
FEWEST_NEW = 64
#: The forms of attention that fetch what they expand.
FORMS = (compat.AttnForwardMethod.MHA_CHUNKED_KV, compat.AttnForwardMethod.MHA_ONE_SHOT)


def install() -> None:
    """Hook SGLang's fetch, for good. Raises RuntimeError if SGLang could not apply the hook."""
    target = compat.CUDA_HOOK_TARGETS["fetch_latent"]
    compat.apply_hooks({target: (_after_fetch, compat.HookType.AFTER)})


def form_of(stock: Any, paged: PagedAttention, attention: Any, forward_batch: Any) -> Any:
    """The form of a layer in a prefill over shifted slots. SGLang's function ``stock`` expands long prefixes
    only, and attends to the latent rows of short ones, in kernels that rotate nothing. Ours take longer, so
    short prefixes are expanded, too. Not over an fp8 pool, where SGLang's kernels round in another way then,
    and not for so few tokens that there is less to attend to than to expand."""
    if max(forward_batch.extend_seq_lens_cpu) < FEWEST_NEW:
        return compat.AttnForwardMethod.MLA
    threshold = getattr(attention, "chunked_prefix_cache_threshold", None)
    if threshold is None or paged.rounds or forward_batch.seq_lens_cpu is None:
        return stock(attention, forward_batch)
    attention.chunked_prefix_cache_threshold = 0
    try:
        return stock(attention, forward_batch)
    finally:
        attention.chunked_prefix_cache_threshold = threshold


def running() -> PagedAttention | None:
    """Our attention in the backend of this forward; None if it has none. A draft model has a backend of its
    own, and a hybrid model has a second one for states."""
    backend = compat.get_attn_backend()
    return getattr(getattr(backend, "full_attn_backend", backend), "paged", None)


def _after_fetch(
    result: tuple[torch.Tensor, torch.Tensor],
    attention: Any,
    kv_indices: torch.Tensor,
    _dtype: torch.dtype,
    forward_batch: Any,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``result``: of the slots ``kv_indices`` ``[n]``, the latent dims ``[n, rank]`` and the rotated dims ``[n,
    1, dims]``."""
    paged = running()
    if paged is None or paged.extend_plan is None:
        return None
    latent, rotated = result
    layer = attention.attn_mha.layer_id
    return latent, paged.rotate_fetched(rotated, layer, kv_indices, forward_batch)


def read_positions(forward_batch: Any, slots: torch.Tensor) -> torch.Tensor:
    """The position at which each of ``slots`` ``[n]`` is read, int64 ``[n]`` on the device. ``slots``: one of
    the tensors in which SGLang's ``forward_batch`` lists slots to fetch. Raises RuntimeError for others."""
    if slots is forward_batch.mha_one_shot_kv_indices:
        lengths = forward_batch.seq_lens
        return _ascending(torch.zeros_like(lengths), lengths, len(slots))
    chunks = forward_batch.prefix_chunk_kv_indices or ()
    whole = slots is forward_batch.prefix_all_kv_indices
    parts = [
        _ascending(
            forward_batch.prefix_chunk_starts[at],
            forward_batch.prefix_chunk_seq_lens[at],
            len(chunk),
        )
        for at, chunk in enumerate(chunks)
        if whole or slots is chunk
    ]
    if parts:
        return torch.cat(parts)
    raise RuntimeError("sglang-reasoncache: SGLang fetches latent rows that no list of it names")


def _ascending(starts: torch.Tensor, lengths: torch.Tensor, count: int) -> torch.Tensor:
    """``lengths[i]`` consecutive numbers from ``starts[i]`` on, for each ``i``: ``count`` in all, int64."""
    lengths = lengths.long()
    before = lengths.cumsum(0) - lengths
    offsets = torch.repeat_interleave(starts.long() - before, lengths, output_size=count)
    return torch.arange(count, device=lengths.device) + offsets
