# SPDX-License-Identifier: Apache-2.0
"""What a selector sees and answers; and Quest, the selector of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sglang_reasoncache.policy_options import between

if TYPE_CHECKING:
    from torch import Tensor


class Selector(Protocol):
    """Scores the pages of a row, in each decode step and layer; the best are read, nothing is freed.

    A frozen dataclass, whose fields are its options.
    """

    @property
    def budget(self) -> int:
        """Positions that a row reads in a layer, its newest page included. Shorter rows are read
        whole."""

    @property
    def whole_layers(self) -> int:
        """How many layers, from the first one on, read everything."""

    def scores(self, shares: Tensor, held: Tensor, page: int) -> Tensor:
        """fp32 ``[rows, pages]``: pages of the highest scores are read, and the newest in any case.

        On a GPU this is captured in a CUDA graph, so it must not wait for the device.

        Args:
            shares: fp32 ``[rows, pages]`` on the pool's device: what the query heads may find in a
                page. Each head has a softmax over the pages, by the largest logit that a key between
                the least and the largest key of the page can have; the heads are added up.
            held: bool ``[rows, pages]``: the row has the page. Scores of others mean nothing.
            page: Positions of a page.
        """


class NamedSelector(NamedTuple):
    """A configured selector and its name in ``--reasoncache-policy``."""

    name: str
    policy: Selector


@dataclass(frozen=True)
class Quest:
    """Quest (Tang et al., 2024, arXiv 2406.10774): reads the pages whose keys may fit the query best.

    Attributes:
        budget: See ``Selector``.
        whole_layers: See ``Selector``; the paper has two.
    """

    budget: int = 1024
    whole_layers: int = 2

    def __post_init__(self) -> None:
        between("budget", self.budget, 1, 10_000_000)
        between("whole_layers", self.whole_layers, 0, 1000)

    def scores(self, shares: Tensor, held: Tensor, page: int) -> Tensor:
        """The shares themselves."""
        return shares
