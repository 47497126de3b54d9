# SPDX-License-Identifier: Apache-2.0
"""Extend attention: several new tokens of a request attend causally to its prefix and to one another.

The entries of a request are the slots that it reads. If a request has few new tokens (one if it decodes in a
mixed chunk), each token reads the entries from the pool, as in decode. If a request has more new tokens, each
layer copies the entries once, rotates the copied keys, and runs PyTorch's fused attention on the copies.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.kernels.decode import decode_attention
from sglang_reasoncache.kernels.paged import PagedKv
from sglang_reasoncache.kernels.row_plan import RowPlan
from sglang_reasoncache.native.pool import DTYPES, cpu_threads

#: If a request has at most this many new tokens, each token is computed as in decode, without copying entries.
MOST_SINGLE = 4
#: PyTorch's own kernels. On Hopper and Blackwell it prefers cuDNN's, for which it builds, and keeps for ever, a
#: plan for each number of tokens.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_BLOCK = 1024  # queries in one call of PyTorch's attention, if the call needs a mask
_MASK_ELEMENTS = 1 << 22  # most elements of a mask that is kept, or of weights computed at once
_NONE = np.zeros(0, dtype=np.int64)


def gather_kv(
    kv: PagedKv, kv_indices: Tensor, shift: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copy entries of one request out of the pool, heads first, for PyTorch's attention.

    Args:
        kv_indices: int32 ``[count]``, slots.
        shift: int32 ``[count]``, by how many positions to rotate each key. None: no key is rotated.
        dtype: Dtype of the result: fp32, bf16 or fp16. Keys are rotated in fp32 and rounded once.

    Returns:
        Keys ``[heads, count, query_dim]`` and values ``[heads, count, v_dim]``, contiguous.

    Raises:
        ValueError: wrong dtype; shifts without a rotation; with the backend "native" a slot or shift out of
            range. "triton" returns zeros for such an entry.
    """
    kv.check(shift, dtype)
    kv_indices = kv_indices.contiguous()
    shift = None if shift is None else shift.contiguous()
    count = len(kv_indices)
    out_k = kv.keys.new_empty((kv.num_heads, count, kv.keys.shape[2]), dtype=dtype)
    out_v = kv.keys.new_empty((kv.num_heads, count, kv.values.shape[2]), dtype=dtype)
    if kv.native is not None:
        kv.native.call(
            "gather", kv_indices, shift, count, out_k, out_v, DTYPES.index(dtype), cpu_threads()
        )
    else:
        from sglang_reasoncache.kernels import gather_triton

        gather_triton.gather(kv, kv_indices, shift, out_k, out_v)
    return torch.cat((out_v, out_k), dim=2) if kv.latent else out_k, out_v


class ExtendPlan:
    """Which entries the new tokens of a forward read. Layers whose KV is in one pool share a plan. A token
    reads its request's entries up to its *own* entry, the entry that names the token's slot.

    Args:
        plan: The entries of each request's row, up to and including those of the new tokens.
        new: Number of new tokens of each request.
        dtype: Dtype of the queries.
        singly: Whether all tokens are computed as in decode, without copies (for soft caps and sinks).
        entries: Number of entries of each row. If None, ``plan`` is read, and the host waits for the device.
        placed: Index of a request -> int64 ``[n]``: the first ``n`` new tokens' own entries, as indexes in the
            row. The row's last entries belong to the other new tokens.

    Raises:
        ValueError: a request with more new tokens than entries; ``new`` or ``entries`` of a wrong length.
    """

    def __init__(
        self,
        plan: RowPlan,
        new: Sequence[int],
        dtype: torch.dtype,
        *,
        singly: bool = False,
        entries: Sequence[int] | None = None,
        placed: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> None:
        self.rows = plan
        self.num_tokens = sum(new)
        #: Per request whose entries are copied: tokens, entries, and the tokens' own entries (None: the last).
        self.pieces: list[tuple[slice, slice, Tensor | None]] = []
        self._device = plan.kv_indptr.device
        self._dtype = dtype
        self._masks: dict[tuple[int, ...], Tensor] = {}
        bounds = plan.kv_indptr.tolist() if entries is None else [0, *accumulate(entries)]
        self.bounds = bounds
        if not len(bounds) - 1 == len(new) == len(plan.kv_indptr) - 1:
            raise ValueError(
                f"new and entries must have {len(plan.kv_indptr) - 1} entries, got {len(new)} "
                f"and {len(bounds) - 1}"
            )
        tokens: list[int] = []
        self._read: list[tuple[int, int]] = []
        at = 0
        for number, (count, begin, end) in enumerate(zip(new, bounds, bounds[1:], strict=False)):
            own_entries = placed.get(number, _NONE)
            if not 0 <= count <= end - begin:
                raise ValueError(f"{count} new tokens in a row of {end - begin} entries")
            if singly or count <= MOST_SINGLE:
                tokens += range(at, at + count)
                self._read += ((begin, begin + int(entry) + 1) for entry in own_entries)
                self._read += (
                    (begin, last) for last in range(end - count + len(own_entries) + 1, end + 1)
                )
            else:
                places = None
                if len(own_entries):
                    last = range(end - begin - count + len(own_entries), end - begin)
                    places = upload([*own_entries, *last], self._device)
                self.pieces.append((slice(at, at + count), slice(begin, end), places))
            at += count
        self.singles = upload(tokens, self._device)
        self._spans: dict[int, tuple[Tensor, Tensor]] = {}

    def spans(self, reach: int) -> tuple[Tensor, Tensor]:
        """For each token that is computed as in decode: its first entry, and one past its last entry."""
        if reach not in self._spans:
            first = [max(begin, end - reach) if reach else begin for begin, end in self._read]
            last = [end for _, end in self._read]
            self._spans[reach] = (
                upload(first, self._device, torch.int32),
                upload(last, self._device, torch.int32),
            )
        return self._spans[reach]

    def mask(
        self, new: int, total: int, reach: int, places: Tensor | None = None, first: int = -1
    ) -> Tensor:
        """Additive mask ``[new, total]`` for tokens over entries. A token sees the last ``reach`` entries up
        to its own, or all if ``reach`` is 0. ``places``, int64 ``[new]``: the tokens' own entries; None if they
        are the last. Small masks are kept for later layers. If ``places`` is given, ``first`` must be the index
        in the batch of the first token, because kept masks are found by ``first``, not by ``places``."""
        key = new, total, reach, first
        mask = self._masks.get(key)
        if mask is None:
            if places is None:
                places = torch.arange(total - new, total, device=self._device)
            mask = torch.zeros(new, total, dtype=self._dtype, device=self._device)
            mask.masked_fill_(_hidden(places, total, reach), -torch.inf)
            if mask.numel() <= _MASK_ELEMENTS:
                self._masks[key] = mask
        return mask


def extend_attention(
    query: Tensor,
    kv: PagedKv,
    plan: ExtendPlan,
    *,
    scale: float,
    logit_cap: float = 0.0,
    sinks: Tensor | None = None,
    reach: int = 0,
) -> Tensor:
    """Causal attention: each new token attends to its request's entries up to the token's own entry. A token
    reads the last ``reach`` of these entries, or all if ``reach`` is 0.

    ``query`` is ``[tokens, heads, query_dim]``, requests one after the other; the result is
    ``[tokens, heads, v_dim]``. The other arguments are those of :func:`decode_attention`. Soft caps and
    sinks need a plan made with ``singly``."""
    if query.shape[0] != plan.num_tokens:
        raise ValueError(f"query must have {plan.num_tokens} tokens, got {query.shape[0]}")
    options: Any = dict(scale=scale, logit_cap=logit_cap, sinks=sinks, spans=plan.spans(reach))
    if not plan.pieces:
        return decode_attention(query, kv, plan.rows, **options)
    if logit_cap > 0 or sinks is not None:
        raise ValueError("soft caps and sinks need an ExtendPlan made with singly=True")
    out = query.new_empty((*query.shape[:2], kv.values.shape[2]))
    if plan.singles.numel():
        out[plan.singles] = decode_attention(query[plan.singles], kv, plan.rows, **options)
    for tokens, entries, places in plan.pieces:
        _extend_piece(
            query[tokens],
            kv,
            plan,
            entries,
            scale=scale,
            reach=reach,
            out=out[tokens],
            places=places,
            first_token=tokens.start,
        )
    return out


def add_attention(
    query: Tensor,
    kv: PagedKv,
    plan: ExtendPlan,
    number: int,
    scale: float,
    received: Tensor,
    reach: int = 0,
) -> None:
    """Sum the attention weights that a request's new tokens give to each of its entries, over tokens and heads.
    Add the sums for the first ``n`` entries to ``received``, fp32 ``[n]``.

    ``query``: the queries of this request, ``[tokens, heads, query_dim]``. ``number``: index of the request in
    the batch. ``reach``: as in :func:`extend_attention`."""
    entries = slice(plan.bounds[number], plan.bounds[number + 1])
    shift = None if plan.rows.shift is None else plan.rows.shift[entries]
    keys = gather_kv(kv, plan.rows.kv_indices[entries], shift, query.dtype)[0].float()
    new = len(query)
    total = keys.shape[1]
    last = torch.arange(total - new, total, device=keys.device)
    # Weights are computed for some queries at a time, because the weights of all queries may take gigabytes.
    step = max(1, _MASK_ELEMENTS * len(keys) // (query.shape[1] * total))
    added = torch.zeros_like(received)
    for begin in range(0, new, step):
        hidden = _hidden(last[begin : begin + step], total, reach)
        groups = query[begin : begin + step].float().chunk(len(keys), dim=1)
        for key, group in zip(keys, groups, strict=True):
            logits = group.transpose(0, 1) @ key.T * scale
            weights = logits.masked_fill_(hidden, -torch.inf).softmax(dim=-1)
            added += weights.sum(dim=(0, 1))[: len(received)]
    received += added


def _hidden(places: Tensor, total: int, reach: int) -> Tensor:
    """Entries that each token does not see: bool ``[n, total]``. ``places``, ``[n]``: tokens' own entries."""
    entries = torch.arange(total, device=places.device)
    hidden = entries > places[:, None]
    return hidden | (entries <= places[:, None] - reach) if reach else hidden


def _for_all_heads(side: Tensor, heads: int) -> Tensor:
    """Keys or values ``[1, kv_heads, entries, dim]`` repeated for each query head. A single KV head, such as
    that of latent rows, is not copied."""
    group = heads // side.shape[1]
    return side[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


def _extend_piece(
    query: Tensor,
    kv: PagedKv,
    plan: ExtendPlan,
    entries: slice,
    *,
    scale: float,
    reach: int,
    out: Tensor,
    places: Tensor | None,
    first_token: int,
) -> None:
    """Compute attention for one request's new tokens on copies of its entries. ``first_token``: index in the
    batch of the first new token."""
    if reach >= entries.stop - entries.start:
        reach = 0
    elif reach and places is None:
        # Entries before the first new token's window are left out, because no later token's window has them.
        entries = slice(max(entries.start, entries.stop - len(query) + 1 - reach), entries.stop)
    shift = None if plan.rows.shift is None else plan.rows.shift[entries]
    keys, values = gather_kv(kv, plan.rows.kv_indices[entries], shift, query.dtype)
    keys = keys[None]
    values = values[None]
    new = len(query)
    total = keys.shape[2]
    queries = query.transpose(0, 1)[None]
    grouped = query.shape[1] != kv.num_heads
    on_cuda = query.device.type == "cuda"
    # On a GPU, PyTorch's flash kernel needs no mask in memory, even if the queries follow a prefix.
    plain = on_cuda and not reach and places is None
    flash = plain and can_use_flash_attention(
        SDPAParams(queries, keys, values, None, 0.0, False, grouped)
    )
    if grouped and on_cuda and not flash:
        # PyTorch's memory-efficient kernel needs as many KV heads as query heads.
        keys = _for_all_heads(keys, query.shape[1])
        values = _for_all_heads(values, query.shape[1])
        grouped = False
    causal = new == total and not reach and places is None
    step = new if flash or causal else _BLOCK
    for begin in range(0, new, step):
        end = min(new, begin + step)
        seen = total - new + end
        first = max(0, total - new + begin + 1 - reach) if reach else 0
        mask = None
        if places is not None:
            seen = total
            first = 0
            mask = plan.mask(end - begin, total, reach, places[begin:end], first_token + begin)
        elif flash and not causal:
            mask = causal_lower_right(new, total)
        elif not causal:
            mask = plan.mask(end - begin, seen - first, reach)
        with sdpa_kernel(_KERNELS):
            result = F.scaled_dot_product_attention(
                queries[:, :, begin:end],
                keys[:, :, first:seen],
                values[:, :, first:seen],
                attn_mask=mask,
                is_causal=causal,
                scale=scale,
                enable_gqa=grouped,
            )
        out[begin:end] = result[0].transpose(0, 1)
