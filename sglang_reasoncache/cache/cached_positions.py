# SPDX-License-Identifier: Apache-2.0
"""A slot's *cached position* is the logical position its key was rotated for.

SGLang caches keys after rotary embedding; a reader at another position rotates by the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class CachedPositions:
    """``positions``, int32 ``[num_slots]`` on the pool's device, written together with the slot."""

    def __init__(self, num_slots: int, device: str | torch.device) -> None:
        self.positions = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def record(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """``slots``, ``positions``: int tensors ``[num_tokens]`` of tokens about to be written."""
        self.positions[slots.long()] = positions.to(torch.int32)

    def shift(self, slots: torch.Tensor, used_at: torch.Tensor) -> torch.Tensor:
        """``used_at - cached_at``, the rotation each entry needs: int32, shaped as ``slots``."""
        return used_at.to(torch.int32) - self.positions[slots.long()]


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

    def reads_shifted(self, rids: Sequence[str] | None) -> bool:
        """Whether the batch of ``rids`` may read either. None: an unknown batch."""
        allocator = self._allocator
        if not (allocator.has_evicted or (self.corrected and allocator.has_shifted_slots)):
            return False
        return self._shifted if rids is not None and rids is self._rids else True
