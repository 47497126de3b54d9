# SPDX-License-Identifier: Apache-2.0
"""Quest (Tang et al., 2024): each step reads the pages whose keys may fit its query best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_reasoncache.policies.evictor import between

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Quest:
    """Reads some ``budget`` positions a step, in whole pages; all of them stay in memory.

    Attributes:
        budget: Positions that a step reads in a layer, the newest page included.
        whole_layers: First layers, which read everything; the paper has two.
    """

    budget: int = 1024
    whole_layers: int = 2

    def __post_init__(self) -> None:
        between("budget", self.budget, 1, 10_000_000)
        between("whole_layers", self.whole_layers, 0, 1000)

    def bounds(self, query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """Largest logit that a key between ``low`` and ``high`` can have under each query head:
        per dim the larger of the products with either end.

        Args:
            query: fp32 ``[rows, heads, dim]``, scaled.
            low, high: fp32 ``[rows, pages, kv_heads, dim]``, over the keys of a page.

        Returns:
            fp32 ``[rows, pages, heads]``.
        """
        rows, pages, kv_heads, dim = low.shape
        grouped = query.reshape(rows, kv_heads, -1, dim).transpose(2, 3)
        # Positive dims of the query meet the upper end, negative ones the lower.
        found = high.transpose(1, 2) @ grouped.clamp_min(0)
        found += low.transpose(1, 2) @ grouped.clamp_max(0)
        return found.transpose(1, 2).reshape(rows, pages, query.shape[1])

    def keep(
        self, bounds: torch.Tensor, held: torch.Tensor, newest: torch.Tensor, page: int
    ) -> torch.Tensor:
        """Which pages are read: the newest, and those of highest bound up to the budget.

        Heads read together, and each has the same say: a page's share in the softmax of the
        head's bounds, added up over heads.

        Args:
            bounds: fp32 ``[rows, pages, heads]``.
            held: bool ``[rows, pages]``, which of them the row has.
            newest: int64 ``[rows]``, the page that is being filled.
            page: Positions of a page.

        Returns:
            bool ``[rows, pages]``.
        """
        shares = bounds.masked_fill(~held[..., None], -math.inf).softmax(dim=1).sum(dim=2)
        shares = shares.masked_fill(~held, -1.0).scatter(1, newest[:, None], math.inf)
        count = min(math.ceil(self.budget / page), held.shape[1])
        best = shares.topk(count, dim=1).indices
        return held & held.new_zeros(held.shape).scatter(1, best, True)
