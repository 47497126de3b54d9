# SPDX-License-Identifier: Apache-2.0
"""The verification of drafted tokens (speculative decoding) as a decode step in which a request has several
queries. SGLang gives each drafted token a slot at the row's end before the forward. The tokens of a request
form a tree, often a chain: a token sees the row's positions before the drafted ones, its ancestors and
itself."""

import torch
from torch import Tensor

from sglang_reasoncache.compat.types import ForwardBatch
from sglang_reasoncache.kernels.row_plan import RowPlan

#: Most drafted tokens of a request: a token's ancestors are bits of an int64.
MOST = 63


def drafted(batch: ForwardBatch) -> int:
    """Number of drafted tokens of each request of a batch. 0 if the batch verifies none."""
    verifies = batch.forward_mode.is_target_verify()
    return int(batch.spec_info.draft_token_num) if verifies else 0


def row_ends(batch: ForwardBatch) -> Tensor:
    """The lengths of a batch's rows on the device, with drafted tokens, int ``[batch]``."""
    count = drafted(batch)
    return batch.seq_lens + count if count else batch.seq_lens


def row_positions(batch: ForwardBatch, count: int) -> Tensor:
    """The position in its row of each drafted token's slot, int64 ``[batch * count]``. In a tree a token's own
    position is smaller. SGLang moves the KV of an accepted token to the slot whose position is the token's."""
    offsets = torch.arange(count, device=batch.seq_lens.device)
    return (batch.seq_lens.long()[:, None] + offsets).flatten()


def sees_of(batch: ForwardBatch, count: int) -> Tensor:
    """Which of its request's drafted tokens each of them sees, int64 ``[batch, count]``; bit i: the i-th.

    For trees SGLang's mask is read: bool, for each request ``[count, length + count]`` (all requests one after
    the other). In a graph the batch may have more requests than the mask: their words mean nothing."""
    lengths = batch.seq_lens.long()
    index = torch.arange(count, device=lengths.device)
    mask = batch.spec_info.custom_mask
    if batch.spec_info.tree_topk == 1 or mask is None or not len(mask):
        return ((torch.ones_like(index) << index + 1) - 1).expand(len(lengths), count).contiguous()
    sizes = count * (lengths + count)
    starts = sizes.cumsum(0) - sizes
    rows = starts[:, None] + index * (lengths[:, None] + count) + lengths[:, None]
    at = (rows[:, :, None] + index).clamp_(max=len(mask) - 1)
    return (mask[at].bool().long() << index).sum(2)


def window_entries(reach: int, count: int) -> int:
    """How many of a row's last positions the plan of layers that see ``reach`` positions (0: all) has for
    ``count`` drafted tokens: all that the first of them sees, and those behind it."""
    return reach + count - 1 if reach else 0


def one_by_one(plan: RowPlan, sees: Tensor, reach: int = 0) -> RowPlan:
    """The plan of ``[batch * count]`` requests, one for each drafted token. ``plan``: the plan of their rows,
    not merged, in host memory. ``sees``: see :func:`sees_of`. ``reach``: how many positions a token sees, its
    own included; 0: all. ``plan`` then has :func:`window_entries`."""
    count = sees.shape[1]
    bounds = plan.kv_indptr.tolist()
    parts = []
    indptr = [0]
    for words, begin, end in zip(sees.tolist(), bounds, bounds[1:], strict=False):
        # How much shorter a row is than what the plan could have of it.
        short = max(window_entries(reach, count) - (end - begin), 0)
        for word in words:
            passed = max(word.bit_count() - 1 - short, 0) if reach else 0
            before = torch.arange(begin + passed, end - count)
            new = [end - count + i for i in range(count) if word >> i & 1]
            parts += [before, torch.tensor(new, dtype=torch.int64)]
            indptr.append(indptr[-1] + len(before) + len(new))
    at = torch.cat(parts)
    shift = None if plan.shift is None else plan.shift[at]
    return RowPlan(torch.tensor(indptr, dtype=torch.int32), plan.kv_indices[at], shift)
