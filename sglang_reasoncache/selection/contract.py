# SPDX-License-Identifier: Apache-2.0
"""What a selecting policy sees and what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

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
