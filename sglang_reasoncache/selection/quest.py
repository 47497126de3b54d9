# SPDX-License-Identifier: Apache-2.0
"""Quest (Tang et al., 2024): each step reads the pages whose keys may fit its query best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_reasoncache.policy_options import between

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

    def keep(
        self, shares: torch.Tensor, held: torch.Tensor, newest: torch.Tensor, page: int
    ) -> torch.Tensor:
        """Which pages are read: the newest, and those of highest share up to the budget; see
        :class:`~sglang_reasoncache.selection.contract.Selector`."""
        shares = shares.masked_fill(~held, -1.0).scatter(1, newest[:, None], math.inf)
        count = min(math.ceil(self.budget / page), held.shape[1])
        best = shares.topk(count, dim=1).indices
        return held & held.new_zeros(held.shape).scatter(1, best, True)
