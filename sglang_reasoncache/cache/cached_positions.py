# SPDX-License-Identifier: Apache-2.0
"""A slot's *cached position* is the logical position its key was rotated for.

SGLang caches keys after rotary embedding; a reader at another position rotates by the difference.
"""

from __future__ import annotations

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
