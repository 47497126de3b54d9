# SPDX-License-Identifier: Apache-2.0
"""Similarity of a step to all earlier ones by counts of tokens (ReasonCache, stage 1).

``sim(c, k) = cosine(v_c, v_k) * min(|S_c|, |S_k|) / max(|S_c|, |S_k|)`` with v the counts of
token ids and |S| the length in characters; MemShare leaves the length factor out.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.filter.step import Step

Floats = npt.NDArray[np.float64]

# (row of the step, count of the token), flattened; 32 bits each.
_POSTING_TYPE = "I"
_POSTING_DTYPE = np.dtype(f"u{array(_POSTING_TYPE).itemsize}")

_TOKENS_AT_ONCE = 32

# One in the fixed point numbers of the mean similarity.
_FIXED_POINT = 2.0**40


def dynamic_threshold(sims: Floats, strict: float, soft: float) -> float:
    """``tau = strict - (strict - soft) * mean(sims)``; ``strict`` without history.

    The mean is the sum of the integers ``rint(sim * 2**40)`` over ``len(sims) * 2**40``: it
    does not depend on the order of summation, so every rank gets the same bits.

    Args:
        sims: shape [earlier steps], between 0 and 1; at most 2**22, so that the sum fits 63
            bits and ``len(sims) * 2**40`` is exact.
    """
    if not len(sims):
        return strict
    total = int(np.rint(sims * _FIXED_POINT).astype(np.int64).sum())
    return strict - (strict - soft) * (total / (len(sims) * _FIXED_POINT))


class StepIndex:
    """Earlier steps of one request, at most ``max_history_steps``; the oldest is forgotten.

    A forgotten step is no candidate any more and leaves the mean of the dynamic threshold.
    Not thread safe.
    """

    def __init__(self, max_history_steps: int, length_factor: bool) -> None:
        self._max_history_steps = max_history_steps
        self._length_factor = length_factor
        self._steps: deque[Step] = deque()
        # Rows of the arrays below; the first `_first` ones are forgotten steps.
        self._first = self._end = 0
        self._num_chars = np.zeros(64)

    def __len__(self) -> int:
        """Steps that can still be candidates."""
        return len(self._steps)

    def __getitem__(self, index: int) -> Step:
        """The step that entry ``index`` of :meth:`similarities` is about."""
        return self._steps[index]

    def add(self, step: Step) -> None:
        """Make a step an earlier one; forget the oldest if there are too many."""
        if self._end == len(self._num_chars):
            # Half of the rows are dead or more room is needed: either costs O(1) a step.
            dead = self._first if self._first >= self._max_history_steps else 0
            self._move(dead, 2 * self._end if not dead else self._end)
        self._num_chars[self._end] = step.num_chars
        self._put(self._end, step)
        self._end += 1
        self._steps.append(step)
        if len(self._steps) > self._max_history_steps:
            self._steps.popleft()
            self._first += 1

    def similarities(self, step: Step) -> Floats:
        """Similarity of ``step`` to every earlier step, oldest first; float64 [len(self)]."""
        rows = slice(self._first, self._end)
        sims = self._cosines(step, rows)
        if self._length_factor:
            chars = self._num_chars[rows]
            sims *= np.minimum(chars, step.num_chars)
            sims /= np.maximum(chars, step.num_chars)
        return sims

    def _put(self, row: int, step: Step) -> None:
        """Store a step's vector."""
        raise NotImplementedError

    def _cosines(self, step: Step, rows: slice) -> Floats:
        """Cosine with every row, a fresh array."""
        raise NotImplementedError

    def _move(self, dead: int, size: int) -> None:
        """Remove the first rows, and give the arrays ``size`` rows."""
        self._num_chars = moved(self._num_chars, dead, size)
        self._first -= dead
        self._end -= dead


def moved(rows: npt.NDArray[Any], dead: int, size: int) -> npt.NDArray[Any]:
    """``rows`` without its first ``dead`` ones, with zeros behind up to ``size`` rows."""
    found = np.zeros((size, *rows.shape[1:]), dtype=rows.dtype)
    found[: len(rows) - dead] = rows[dead:]
    return found


class LexicalIndex(StepIndex):
    """Counts of tokens; steps are found through the tokens they contain.

    A query reads the postings of its own distinct tokens only, so a step that shares no token
    costs nothing but its zero in the result.
    """

    def __init__(self, max_history_steps: int, length_factor: bool = True) -> None:
        super().__init__(max_history_steps, length_factor)
        self._postings: dict[int, array[int]] = {}
        self._norm_sq = np.zeros(len(self._num_chars))

    def _put(self, row: int, step: Step) -> None:
        self._norm_sq[row] = step.norm_sq
        for token, count in step.bag.items():
            self._postings.setdefault(token, array(_POSTING_TYPE)).extend((row, count))

    def _cosines(self, step: Step, rows: slice) -> Floats:
        dots = np.zeros(self._end)
        hits = [(n, found) for t, n in step.bag.items() if (found := self._postings.get(t))]
        # Not all at once: what a part takes stays in the processor's cache.
        for at in range(0, len(hits), _TOKENS_AT_ONCE):
            counts, postings = zip(*hits[at : at + _TOKENS_AT_ONCE], strict=True)
            joined = np.frombuffer(b"".join(postings), dtype=_POSTING_DTYPE)
            weights = np.repeat(np.array(counts, dtype=np.float64), [len(p) >> 1 for p in postings])
            weights *= joined[1::2]
            dots += np.bincount(joined[::2], weights, minlength=self._end)
        # The product is an exact integer, so equal bags give exactly 1.
        return np.asarray(dots[rows] / np.sqrt(self._norm_sq[rows] * step.norm_sq))

    def _move(self, dead: int, size: int) -> None:
        super()._move(dead, size)
        self._norm_sq = moved(self._norm_sq, dead, size)
        if dead:
            kept: dict[int, array[int]] = {}
            for token, posting in self._postings.items():
                pairs = np.frombuffer(posting, dtype=_POSTING_DTYPE).reshape(-1, 2)
                pairs = pairs[pairs[:, 0] >= dead]
                if len(pairs):
                    pairs[:, 0] -= dead
                    kept[token] = array(_POSTING_TYPE, pairs.tobytes())
            self._postings = kept
