# SPDX-License-Identifier: Apache-2.0
"""Whether the forward about to run reads shifted slots or evicted positions, known on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BatchMark:
    """What is known about the batch built last. An unknown one counts as reading some.

    ``allocator``: ours. ``corrected``: shifted slots count; else keys are read as cached.
    """

    def __init__(self, allocator: Any, *, corrected: bool = True) -> None:
        self._allocator, self.corrected = allocator, corrected
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
