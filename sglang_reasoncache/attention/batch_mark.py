# SPDX-License-Identifier: Apache-2.0
"""Which batch our CUDA kernels serve, as the host knows it when it builds one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BatchMark:
    """What the host knows about the batch built last; an unknown one may read anything.

    ``allocator``: ours. ``corrected``: shifted slots count; else keys are read as cached.
    """

    def __init__(self, allocator: Any, *, corrected: bool = True) -> None:
        self._allocator, self.corrected = allocator, corrected
        self._rids: Sequence[str] | None = None
        self._evicted: Sequence[int] | None = None
        self._shifted = True

    def note(
        self, rids: Sequence[str], shifted: bool, evicted: Sequence[int] | None = None
    ) -> None:
        """The batch of ``rids`` reads shifted slots or evicted positions, or neither.

        ``rids``: SGLang's list of a batch's request ids; the object tells it from other batches.
        ``evicted``: How many positions of each of its rows were; None: unknown.
        """
        shifted = shifted or any(evicted or ())
        self._rids, self._evicted, self._shifted = rids, evicted, shifted

    def evicted(self, rids: Sequence[str] | None) -> Sequence[int] | None:
        """Of each row of the batch; None: unknown."""
        return self._evicted if rids is not None and rids is self._rids else None

    def needs_ours(self, rids: Sequence[str] | None) -> bool:
        """Whether the batch of ``rids`` may read either, which only our kernels can. None: unknown."""
        allocator = self._allocator
        if not (allocator.has_evicted or (self.corrected and allocator.has_shifted_slots)):
            return False
        return self._shifted if rids is not None and rids is self._rids else True
