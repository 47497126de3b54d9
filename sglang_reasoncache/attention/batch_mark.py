# SPDX-License-Identifier: Apache-2.0
"""Marks a batch with what the host knows about its rows when it builds the batch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any


class GraphVote(enum.IntEnum):
    """Which decode graph a group of DP attention can run. The groups take the smallest vote.

    Takes the place of a bool of SGLang's: EAGER is false, SHIFTED and PLAIN are true.
    """

    EAGER, SHIFTED, PLAIN = range(3)


class MarkedRids(list[str]):
    """The request ids of a batch, marked with what its rows hold.

    SGLang passes this list, a field of ``ForwardBatch``, on to every copy of the batch. A batch whose
    ids are a plain list was not looked at: its rows may hold anything.

    Args:
        rids: The request ids.
        needs_ours: Some row has shifted slots or evicted positions, which only our kernels can read.
        evicted: How many positions of each row were evicted; None: unknown.
    """

    def __init__(
        self, rids: Sequence[str], needs_ours: bool, evicted: Sequence[int] | None = None
    ) -> None:
        super().__init__(rids)
        self.needs_ours, self.evicted = needs_ours, evicted


def mark_of(batch: Any) -> MarkedRids | None:
    """The mark of a ``ForwardBatch``; None: unknown."""
    return batch.rids if isinstance(batch.rids, MarkedRids) else None
