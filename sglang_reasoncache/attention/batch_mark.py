# SPDX-License-Identifier: Apache-2.0
"""A mark on a batch, set by the host, which tells the attention backend whether our kernels must run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class MarkedRids(list[str]):
    """The request ids of a batch, marked with what its rows hold.

    SGLang hands this list, ``ForwardBatch.rids``, on to every copy of the batch. If the list of a batch is
    not marked, the batch's rows were not checked and may have shifted slots or evicted positions.

    Args:
        rids: The request ids.
        needs_ours: Whether some row has shifted slots or evicted positions: only our kernels can read these.
        evicted: How many positions of each row were evicted; None if unknown.
    """

    def __init__(
        self, rids: Sequence[str], needs_ours: bool, evicted: Sequence[int] | None = None
    ) -> None:
        super().__init__(rids)
        self.needs_ours = needs_ours
        self.evicted = evicted
        #: How many slots the rows name at most. None if the host knows their lengths.
        self.slots: int | None = None


def mark_of(batch: Any) -> MarkedRids | None:
    """The marked request ids of a ``ForwardBatch``; None if its ids were not marked."""
    return batch.rids if isinstance(batch.rids, MarkedRids) else None
