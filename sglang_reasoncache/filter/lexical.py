# SPDX-License-Identifier: Apache-2.0
"""Lexical similarity of a step to all earlier ones (ReasonCache, stage 1).

``sim(c, k) = cosine(v_c, v_k) * min(|S_c|, |S_k|) / max(|S_c|, |S_k|)`` with v
the counts of token ids and |S| the length in characters; MemShare leaves the
length factor out.
"""

from __future__ import annotations

from array import array
from collections import deque

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.filter.step import Step

# (index of the step, count of the token), flattened; 32 bits each.
_POSTING_TYPE = "I"
_POSTING_DTYPE = np.dtype(f"u{array(_POSTING_TYPE).itemsize}")

# One in the fixed point numbers of the mean similarity.
_FIXED_POINT = 2.0**40


def dynamic_threshold(sims: npt.NDArray[np.float64], strict: float, soft: float) -> float:
    """``tau = strict - (strict - soft) * mean(sims)``; ``strict`` without history.

    The mean is defined over fixed-point numbers, the sum of the integers
    ``rint(sim * 2**40)`` over ``len(sims) * 2**40``: it does not depend on the
    order of summation, so every implementation and every rank gets the same bits.

    Args:
        sims: shape [earlier steps], similarities of one step to all of them,
            between 0 and 1; at most 2**22 of them, so that the sum fits 63 bits
            and ``len(sims) * 2**40`` is exact.
    """
    if not len(sims):
        return strict
    total = int(np.rint(sims * _FIXED_POINT).astype(np.int64).sum())
    return strict - (strict - soft) * (total / (len(sims) * _FIXED_POINT))


class LexicalIndex:
    """Earlier steps of one request, found through the tokens they contain.

    A query reads the postings of its own distinct tokens only, so a step that
    shares no token costs nothing but its zero in the result. The oldest step
    is dropped when ``max_history_steps`` is exceeded: it is no candidate any
    more and leaves the mean that enters the dynamic threshold.

    Not thread safe; owned by one request.

    Raises:
        ValueError: ``max_history_steps`` below 1.
    """

    def __init__(self, max_history_steps: int, length_factor: bool = True) -> None:
        if max_history_steps < 1:
            raise ValueError(
                f"--reasoncache-max-history-steps must be at least 1, got {max_history_steps}"
            )
        self._max_history_steps = max_history_steps
        self._length_factor = length_factor
        self._steps: deque[Step] = deque()
        # Rows of postings and of the two arrays below; the first `_num_dropped`
        # rows are steps that history has already forgotten.
        self._num_rows = 0
        self._num_dropped = 0
        self._postings: dict[int, array[int]] = {}
        self._norm_sq = np.zeros(64)
        self._num_chars = np.zeros(64)

    def __len__(self) -> int:
        """Steps that can still be candidates."""
        return len(self._steps)

    def __getitem__(self, index: int) -> Step:
        """The step that entry ``index`` of :meth:`similarities` is about."""
        return self._steps[index]

    def add(self, step: Step) -> None:
        """Make a step an earlier one; forget the oldest if there are too many."""
        row = self._num_rows
        if row == len(self._norm_sq):
            self._norm_sq = np.concatenate([self._norm_sq, np.zeros(row)])
            self._num_chars = np.concatenate([self._num_chars, np.zeros(row)])
        self._norm_sq[row] = step.norm_sq
        self._num_chars[row] = step.num_chars
        for token, count in zip(step.bag_tokens, step.bag_counts, strict=True):
            posting = self._postings.get(token)
            if posting is None:
                self._postings[token] = posting = array(_POSTING_TYPE)
            posting.append(row)
            posting.append(count)
        self._num_rows = row + 1
        self._steps.append(step)
        if len(self._steps) > self._max_history_steps:
            self._steps.popleft()
            self._num_dropped += 1
            # Half of the rows are dead: cleaning up now costs O(1) a step.
            if self._num_dropped >= self._max_history_steps:
                self._compact()

    def similarities(self, step: Step) -> npt.NDArray[np.float64]:
        """Similarity of ``step`` to every earlier step, oldest first.

        Returns:
            Shape [len(self)], float64, between 0 and 1.
        """
        rows = slice(self._num_dropped, self._num_rows)
        # The product is an exact integer, so equal bags give exactly 1.
        scale = np.sqrt(self._norm_sq[rows] * step.norm_sq)
        sims = self._dots(step)[rows] / scale
        if self._length_factor:
            chars = self._num_chars[rows]
            sims *= np.minimum(chars, step.num_chars)
            sims /= np.maximum(chars, step.num_chars)
        return sims

    def _dots(self, step: Step) -> npt.NDArray[np.float64]:
        """Dot product of the counts with every row, shape [num_rows]."""
        hits: list[array[int]] = []
        counts: list[int] = []
        for token, count in zip(step.bag_tokens, step.bag_counts, strict=True):
            posting = self._postings.get(token)
            if posting is not None:
                hits.append(posting)
                counts.append(count)
        if not hits:
            return np.zeros(self._num_rows)
        # One copy of all postings, then no Python loop over them.
        joined = np.frombuffer(b"".join(hits), dtype=_POSTING_DTYPE).reshape(-1, 2)
        lengths = [len(posting) >> 1 for posting in hits]
        weights = np.repeat(np.array(counts, dtype=np.float64), lengths)
        weights *= joined[:, 1]
        dots = np.bincount(joined[:, 0], weights, minlength=self._num_rows)
        return np.asarray(dots, dtype=np.float64)

    def _compact(self) -> None:
        """Remove the rows of forgotten steps."""
        dropped = self._num_dropped
        kept: dict[int, array[int]] = {}
        for token, posting in self._postings.items():
            pairs = np.frombuffer(posting, dtype=_POSTING_DTYPE).reshape(-1, 2)
            pairs = pairs[pairs[:, 0] >= dropped]
            if len(pairs):
                pairs[:, 0] -= dropped
                kept[token] = array(_POSTING_TYPE, pairs.tobytes())
        self._postings = kept
        self._norm_sq = np.concatenate([self._norm_sq[dropped:], np.zeros(dropped)])
        self._num_chars = np.concatenate([self._num_chars[dropped:], np.zeros(dropped)])
        self._num_rows -= dropped
        self._num_dropped = 0
