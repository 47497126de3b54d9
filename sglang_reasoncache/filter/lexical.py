# SPDX-License-Identifier: Apache-2.0
"""Similarity of a step (text between blank lines) to all earlier steps of the response, from counts of tokens.

The similarity of steps c and k is ``cosine(v_c, v_k) * min(|S_c|, |S_k|) / max(|S_c|, |S_k|)``. v_c counts the
token ids of c; |S_c| is the length of c in characters. MemShare leaves out the length factor ``min / max``.
"""

from array import array
from collections import deque
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.filter.segment import Step

Floats = npt.NDArray[np.float64]

# Each token id has a posting list, a flat array of 32-bit integers: step number, count in that step, and so on.
_POSTING_TYPE = "I"
_POSTING_DTYPE = np.dtype(f"u{array(_POSTING_TYPE).itemsize}")
_TOKENS_AT_ONCE = 32
# The number 1 in fixed point, see ``dynamic_threshold``.
_FIXED_POINT = 2.0**40


def dynamic_threshold(sims: Floats, strict: float, soft: float) -> float:
    """``tau = strict - (strict - soft) * mean(sims)``, or ``strict`` if there are no earlier steps.

    The mean is computed from the integers ``rint(sim * 2**40)``, because a sum of integers does not depend
    on the order of summation. So all tensor-parallel ranks get exactly the same threshold.

    Args:
        sims: Similarity to each earlier step, a float64 between 0 and 1. At most 2**22 steps, so that the
            sum of the integers fits into an int64.
    """
    if not len(sims):
        return strict
    total = int(np.rint(sims * _FIXED_POINT).astype(np.int64).sum())
    return strict - (strict - soft) * (total / (len(sims) * _FIXED_POINT))


def length_factors(num_chars: Floats, step: Step) -> Floats:
    """``min / max`` of the characters of ``step`` and of each other step (``num_chars``)."""
    return np.minimum(num_chars, step.num_chars) / np.maximum(num_chars, step.num_chars)


class StepIndex(Protocol):
    """Remembers the newest steps of one request, and says how similar they are to another step."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Step: ...

    def add(self, step: Step) -> None: ...

    def similarities(self, step: Step) -> Floats: ...


class LexicalIndex:
    """The newest ``max_history_steps`` earlier steps of one request. Not thread safe.

    Older steps are no candidates, and do not count in the mean of the dynamic threshold. The index is
    inverted: to compare a step, only the posting lists of its tokens are read.
    """

    def __init__(self, max_history_steps: int, length_factor: bool = True) -> None:
        self._max_history_steps = max_history_steps
        self._length_factor = length_factor
        self._steps: deque[Step] = deque()
        self._num_chars = array("d")
        self._norm_sq = array("d")
        self._postings: dict[int, array[int]] = {}
        self._num_forgotten = 0

    def __len__(self) -> int:
        """Number of remembered steps."""
        return len(self._steps)

    def __getitem__(self, index: int) -> Step:
        return self._steps[index]

    def add(self, step: Step) -> None:
        """Remember ``step``. If there are now more than ``max_history_steps`` steps, forget the oldest."""
        number = self._num_forgotten + len(self)
        self._steps.append(step)
        self._num_chars.append(step.num_chars)
        self._norm_sq.append(step.norm_sq)
        for token, count in step.bag.items():
            self._postings.setdefault(token, array(_POSTING_TYPE)).extend((number, count))
        if len(self) > self._max_history_steps:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._num_forgotten += 1
        del self._num_chars[0], self._norm_sq[0]
        for token in self._steps.popleft().bag:
            # Posting lists are sorted by step, so the first two numbers belong to the oldest step.
            del self._postings[token][:2]
            if not self._postings[token]:
                del self._postings[token]

    def similarities(self, step: Step) -> Floats:
        """Similarity of ``step`` to every remembered step, oldest first: float64 ``[len(self)]``."""
        dots = np.zeros(len(self))
        hits = [(n, posting) for t, n in step.bag.items() if (posting := self._postings.get(t))]
        # Each pass takes only a few tokens, so that its data fits into the processor's cache.
        for at in range(0, len(hits), _TOKENS_AT_ONCE):
            counts, postings = zip(*hits[at : at + _TOKENS_AT_ONCE], strict=True)
            joined = np.frombuffer(b"".join(postings), dtype=_POSTING_DTYPE)
            weights = np.repeat(np.array(counts, dtype=np.float64), [len(p) >> 1 for p in postings])
            weights *= joined[1::2]
            dots += np.bincount(joined[::2] - self._num_forgotten, weights, minlength=len(self))
        # The product of the squared norms is an exact integer, so equal bags give exactly 1.
        sims = np.asarray(dots / np.sqrt(np.array(self._norm_sq) * step.norm_sq))
        if self._length_factor:
            sims *= length_factors(np.array(self._num_chars), step)
        return sims
