# SPDX-License-Identifier: Apache-2.0
"""What a selecting policy sees and what it answers; and the one of this package."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sglang_reasoncache.policy_options import between

if TYPE_CHECKING:
    import torch


class Selector(Protocol):
    """Reads fewer pages in a decode step; nothing is freed. A frozen dataclass."""

    @property
    def budget(self) -> int:
        """Positions read. Rows with no more are read whole, without a decision."""

    @property
    def whole_layers(self) -> int:
        """First layers that read everything."""

    def keep(
        self, shares: torch.Tensor, held: torch.Tensor, newest: torch.Tensor, page: int
    ) -> torch.Tensor:
        """bool ``[rows, pages]``, which are read; asked in every layer, on the pool's device.

        Args:
            shares: fp32 ``[rows, pages]``, what the query heads may find in a page: each head's
                softmax over the pages by the largest logit that a key between the least and
                largest ones of the page can have, added up over heads.
            held: bool ``[rows, pages]``, which of them the row has.
            newest: int64 ``[rows]``, the page that is being filled; one of those to be read.
            page: Positions of a page.
        """


class NamedSelector(NamedTuple):
    """A configured selector and its name in ``--reasoncache-policy``."""

    name: str
    policy: Selector


@dataclass(frozen=True)
class Quest:
    """Quest (Tang et al., 2024): each step reads the pages whose keys may fit its query best, some
    ``budget`` positions. All of them stay in memory.

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
        """Which pages are read: the newest, and those of highest share up to the budget."""
        shares = shares.masked_fill(~held, -1.0).scatter(1, newest[:, None], math.inf)
        count = min(math.ceil(self.budget / page), held.shape[1])
        best = shares.topk(count, dim=1).indices
        return held & held.new_zeros(held.shape).scatter(1, best, True)
