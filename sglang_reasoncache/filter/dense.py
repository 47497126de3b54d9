# SPDX-License-Identifier: Apache-2.0
"""Similarity of a step to all earlier ones by dense vectors; an ablation.

``sim(c, k) = e_c . e_k * min(|S_c|, |S_k|) / max(|S_c|, |S_k|)`` with e the unit vectors of a
:class:`StepEncoder`: ReasonCache's formula with another encoder.
"""

from __future__ import annotations

import numpy as np

from sglang_reasoncache.filter.encoder import StepEncoder, Vector
from sglang_reasoncache.filter.lexical import Floats, StepIndex, moved
from sglang_reasoncache.filter.step import Step

# Float32 sums of unit vectors hold no more; equal steps come out as exactly 1,
# wherever the matrix product's order of summation puts their rows.
_DECIMALS = 6


class DenseIndex(StepIndex):
    """Vectors of one length.

    Similarities are rounded to six decimals, 0 where either step's vector is zero. Negative
    cosines count as they are, in the mean too, as the formula has it: a response whose steps
    point away from each other gets a threshold above ``strict`` and shares less.
    """

    def __init__(
        self, encoder: StepEncoder, max_history_steps: int, length_factor: bool = True
    ) -> None:
        super().__init__(max_history_steps, length_factor)
        self._encoder = encoder
        self._vectors: Vector = np.zeros((len(self._num_chars), 0), dtype=np.float32)
        # The step that was encoded last: similarities() comes right before add().
        self._encoded: tuple[Step, Vector] | None = None

    def _put(self, row: int, step: Step) -> None:
        vector = self._vector(step)
        self._encoded = None
        if not self._vectors.shape[1]:
            self._vectors = np.zeros((len(self._vectors), len(vector)), dtype=np.float32)
        self._vectors[row] = vector

    def _cosines(self, step: Step, rows: slice) -> Floats:
        vector = self._vector(step)
        if not len(self):
            return np.zeros(0)
        sims = (self._vectors[rows] @ vector).astype(np.float64)
        return np.clip(np.round(sims, _DECIMALS, out=sims), -1.0, 1.0, out=sims)

    def _move(self, dead: int, size: int) -> None:
        super()._move(dead, size)
        self._vectors = moved(self._vectors, dead, size)

    def _vector(self, step: Step) -> Vector:
        """The step's vector, computed once; zeros unless all of it is finite."""
        if self._encoded is None or self._encoded[0] is not step:
            # The bag leaves out the blank tokens at the end, and so does this.
            vector = self._encoder.encode(step.token_ids[: step.bag.total()], step.text)
            if not np.isfinite(vector).all():
                vector = np.zeros_like(vector)
            self._encoded = (step, vector)
        return self._encoded[1]
