# SPDX-License-Identifier: Apache-2.0
"""Which positions of one request have their KV in the same slot."""

from __future__ import annotations

import numpy as np


class SlotAliases:
    """A number for each position, equal where a row names the same slot twice: the position whose
    slot it was first, which may name another slot by now, or be evicted."""

    def __init__(self) -> None:
        self._of = np.zeros(0, dtype=np.int64)

    def share(self, dst: int, src: int, length: int) -> None:
        """Positions from ``dst`` on now have the slots of those from ``src`` on."""
        end = dst + length
        if end > len(self._of):
            grown = np.arange(max(end, 2 * len(self._of), 256))
            grown[: len(self._of)] = self._of
            self._of = grown
        self._of[dst : dst + length] = self._of[src : src + length]

    def of(self, positions: np.ndarray) -> np.ndarray:
        """int64, as long as ``positions``, which ascend."""
        known = int(np.searchsorted(positions, len(self._of)))
        return np.concatenate((self._of[positions[:known]], positions[known:]))
