# SPDX-License-Identifier: Apache-2.0
"""Whether the forward about to run reads shifted slots or evicted positions.

The scheduler redirects and evicts on the host, so nothing is asked of a device. An unknown
batch counts as reading some: a false positive is slow, a false negative is incorrect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class SlotFlags(Protocol):
    """Of our allocators; both are False while nothing was ever shared or evicted."""

    has_shifted_slots: bool
    has_evicted: bool


class BatchMark:
    """What is known about the batch built last.

    ``corrected``: shifted slots count; keys that are read as cached need no rotation.
    """

    def __init__(self, allocator: SlotFlags, *, corrected: bool = True) -> None:
        self._allocator = allocator
        self.corrected = corrected
        self._rids: Sequence[str] | None = None
        self._shifted = True

    def note(self, rids: Sequence[str], shifted: bool) -> None:
        """The batch of ``rids`` reads shifted slots or evicted positions, or neither.

        ``rids``: SGLang's list of a batch's request ids; the object tells its batch
        from every other one, through the copies SGLang makes of it.
        """
        self._rids, self._shifted = rids, shifted

    def reads_shifted(self, rids: Sequence[str] | None) -> bool:
        """Whether the batch of ``rids`` may read either. None: an unknown batch."""
        allocator = self._allocator
        if not (allocator.has_evicted or (self.corrected and allocator.has_shifted_slots)):
            return False
        return self._shifted if rids is not None and rids is self._rids else True
