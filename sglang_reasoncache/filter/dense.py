# SPDX-License-Identifier: Apache-2.0
"""Similarity of a step to all earlier ones by dense vectors; an ablation.

``sim(c, k) = e_c . e_k * min(|S_c|, |S_k|) / max(|S_c|, |S_k|)`` with e the unit
vectors of a :class:`StepEncoder`: ReasonCache's formula with another encoder.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.filter.encoder import StepEncoder, Vector
from sglang_reasoncache.filter.step import Step

_INITIAL_ROWS = 16
# Float32 sums of unit vectors hold no more; equal steps come out as exactly 1,
# wherever the matrix product's order of summation puts their rows.
_DECIMALS = 6


class DenseIndex:
    """Earlier steps of one request as rows of a matrix, like :class:`LexicalIndex`.

    The oldest step gives its row to the newest once there are
    ``max_history_steps``, so memory is at most that many rows.

    Negative cosines count as they are, in the mean too, as the formula has it: a
    response whose steps point away from each other gets a dynamic threshold above
    ``strict`` and shares less.

    Not thread safe; owned by one request.

    Raises:
        ValueError: ``max_history_steps`` below 1.
    """

    def __init__(
        self, encoder: StepEncoder, max_history_steps: int, length_factor: bool = True
    ) -> None:
        if max_history_steps < 1:
            raise ValueError(
                f"--reasoncache-max-history-steps must be at least 1, got {max_history_steps}"
            )
        self._encoder = encoder
        self._max_history_steps = max_history_steps
        self._length_factor = length_factor
        # Rings: entry 0 of history is row `_oldest`.
        self._steps: list[Step] = []
        self._oldest = 0
        self._vectors: Vector = np.zeros((0, 0), dtype=np.float32)
        self._num_chars = np.zeros(0)
        # The step that was encoded last: similarities() comes right before add().
        self._encoded: tuple[Step, Vector] | None = None

    def __len__(self) -> int:
        """Steps that can still be candidates."""
        return len(self._steps)

    def __getitem__(self, index: int) -> Step:
        """The step that entry ``index`` of :meth:`similarities` is about.

        Raises:
            IndexError: no such entry.
        """
        if not 0 <= index < len(self._steps):
            raise IndexError(f"step {index} of {len(self._steps)}")
        return self._steps[(self._oldest + index) % len(self._steps)]

    def add(self, step: Step) -> None:
        """Make a step an earlier one; forget the oldest if there are too many."""
        vector = self._vector(step)
        self._encoded = None
        row = len(self._steps)
        if row < self._max_history_steps:
            self._steps.append(step)
            if row == len(self._num_chars):
                self._grow(len(vector))
        else:
            row = self._oldest
            self._steps[row] = step
            self._oldest = (row + 1) % self._max_history_steps
        self._vectors[row] = vector
        self._num_chars[row] = step.num_chars

    def similarities(self, step: Step) -> npt.NDArray[np.float64]:
        """Similarity of ``step`` to every earlier step, oldest first.

        Returns:
            Shape [len(self)], float64, between -1 and 1, to six decimals; 0 where
            either step's vector is zero.
        """
        num_rows = len(self._steps)
        vector = self._vector(step)
        if not num_rows:
            return np.zeros(0)
        sims = (self._vectors[:num_rows] @ vector).astype(np.float64)
        np.clip(np.round(sims, _DECIMALS, out=sims), -1.0, 1.0, out=sims)
        if self._length_factor:
            chars = self._num_chars[:num_rows]
            sims *= np.minimum(chars, step.num_chars)
            sims /= np.maximum(chars, step.num_chars)
        return np.roll(sims, -self._oldest)

    def _vector(self, step: Step) -> Vector:
        """The step's vector, computed once; zeros unless all of it is finite."""
        if self._encoded is None or self._encoded[0] is not step:
            # The bag leaves out the blank tokens at the end, and so does this.
            tokens = step.token_ids[: sum(step.bag_counts)]
            vector = self._encoder.encode(tokens, step.text)
            if not np.isfinite(vector).all():
                vector = np.zeros_like(vector)
            self._encoded = (step, vector)
        return self._encoded[1]

    def _grow(self, dim: int) -> None:
        """Double the rows, up to the bound."""
        old = len(self._num_chars)
        rows = min(self._max_history_steps, max(_INITIAL_ROWS, 2 * old))
        vectors = np.zeros((rows, dim), dtype=np.float32)
        num_chars = np.zeros(rows)
        if old:
            vectors[:old] = self._vectors
            num_chars[:old] = self._num_chars
        self._vectors, self._num_chars = vectors, num_chars
