# SPDX-License-Identifier: Apache-2.0
"""A score for each position from its neighbours', so that what is kept hangs together."""

from __future__ import annotations

import numpy as np


def pooled(scores: np.ndarray, kernel: int, kind: str) -> np.ndarray:
    """``max`` or ``avg`` of the ``kernel`` scores around each; beyond the ends lie zeros.

    Args:
        scores: float ``[held]``, none below 0, neighbours in the cache side by side.
        kernel: Odd; an even one reaches one further back than forth.
    """
    if not len(scores):
        return scores
    sides = (kernel // 2, kernel - 1 - kernel // 2)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(scores, sides), kernel)
    return windows.max(axis=1) if kind == "max" else windows.mean(axis=1)
