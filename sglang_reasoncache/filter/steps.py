# SPDX-License-Identifier: Apache-2.0
"""Pairs blocks of a step (text between blank lines) with blocks of similar earlier steps: stage 1 of the
ReasonCache paper. Stage 2 compares the KV of each pair. It is in ``sharing/``, because the KV is on the device.

The similarity of steps c and k is ``cosine(v_c, v_k) * min(|S_c|, |S_k|) / max(|S_c|, |S_k|)``. v_c counts the
token ids of c; |S_c| is the length of c in characters. MemShare leaves out the length factor ``min / max``.
"""

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.filter.matcher import BlockPair, FilterCounters, Matcher, block_starts
from sglang_reasoncache.filter.segment import BLANK, Step, TokenClasses
from sglang_reasoncache.filter.settings import AlignMode, FilterConfig
from sglang_reasoncache.filter.structure import Signature, same_structure, signature
from sglang_reasoncache.filter.vocabulary import Vocabulary

Floats = npt.NDArray[np.float64]

# Each token id has a posting list, a flat array of 32-bit integers: step number, count in that step, and so on.
_POSTING_TYPE = "I"
_POSTING_DTYPE = np.dtype(f"u{array(_POSTING_TYPE).itemsize}")
_TOKENS_AT_ONCE = 32
# The number 1 in fixed point, see ``dynamic_threshold``.
_FIXED_POINT = 2.0**40


class StepMatcher(Matcher):
    """Compares each step of a response with the ``max_history_steps`` steps before it."""

    def __init__(self, config: FilterConfig, classes: TokenClasses, vocabulary: Vocabulary) -> None:
        self._config, self._classes, self._vocabulary = config, classes, vocabulary
        self._in_code = False
        self._history = LexicalIndex(config.max_history_steps, config.length_factor)
        # How many more characters of earlier steps may be parsed for the current step.
        self._readable = 0

    def build(self, start: int, tokens: Sequence[int]) -> Step:
        num_blank_tail = 0
        while self._classes(tokens[-1 - num_blank_tail]) & BLANK:
            num_blank_tail += 1
        text = self._vocabulary.text(tokens)
        step = Step.build(start, tokens, text, num_blank_tail, self._in_code)
        # Each ``` opens or closes a code fence.
        self._in_code ^= text.count("```") % 2 == 1
        return step

    def propose(self, step: Step) -> list[BlockPair]:
        self.counters = FilterCounters()
        found = self._align(step, self._candidates(step))
        self._history.add(step)
        if not self._config.use_structure:
            step.text = ""  # not needed any more
        return found

    def _candidates(self, step: Step) -> list[int]:
        """History indexes of the most similar steps above the threshold, best first; newest first if equal."""
        if not len(self._history):
            return []
        config = self._config
        sims = self._history.similarities(step)
        tau = config.fixed_tau
        if tau is None:
            tau = dynamic_threshold(sims, config.strict, config.soft)
        above = np.flatnonzero(sims > tau)
        self.counters.candidates = len(above)
        # Reversed before the stable sort, so that the latest of equally similar steps comes first.
        order = above[::-1]
        order = order[np.argsort(-sims[order], kind="stable")]
        found: list[int] = order[: config.max_structure_checks].tolist()
        return found

    def _align(self, step: Step, candidates: list[int]) -> list[BlockPair]:
        """Pair blocks of ``step`` with blocks of the best candidates that pass the structure check."""
        config = self._config
        pairs: list[BlockPair] = []
        covered = bytearray(len(step))
        num_used = 0
        self._readable = config.limits.max_chars // 2
        for index in candidates:
            left = config.max_blocks_per_step - len(pairs)
            if num_used == config.max_candidates or left <= 0 or covered.count(0) < config.block:
                break
            earlier = self._history[index]
            if config.use_structure and not self._passes(step, earlier):
                continue
            num_used += 1
            found = align_blocks(
                step, earlier, config.block, config.page_size, config.align, covered
            )
            for dst, src in found[:left]:
                pairs.append(BlockPair(dst, src))
                at = dst - step.start
                covered[at : at + config.block] = b"\x01" * config.block
        pairs.sort()
        return pairs

    def _passes(self, step: Step, earlier: Step) -> bool:
        if earlier.signature is None:
            # Once the limit for this step is used up, no more earlier steps are parsed.
            if self._readable <= 0:
                return False
            self._readable -= len(earlier.text)
        a, b = self._signature(step), self._signature(earlier)
        if same_structure(a, b, self._config.structure_tolerance, self._config.limits):
            return True
        self.counters.dropped_structure += not (a.bound or b.bound)
        return False

    def _signature(self, step: Step) -> Signature:
        """The parsed mathematics and code of ``step``. Parsed on first use: most steps never need this."""
        if step.signature is None:
            step.signature = signature(step.text, self._config.limits, in_code=step.in_code)
            step.text = ""  # only the signature is needed from now on
            self.counters.over_bound += bool(step.signature.bound)
        return step.signature


def align_blocks(
    dst: Step,
    src: Step,
    block: int,
    page_size: int = 1,
    mode: AlignMode = "tokens",
    covered: bytes | bytearray = b"",
) -> list[BlockPair]:
    """Pair blocks of ``dst`` with blocks of ``src``. The pairs are sorted by ``dst_start``, and their
    ``dst`` blocks do not overlap.

    Args:
        block: Tokens per block.
        page_size: If above 1, each paired block is one whole page, and ``block`` equals ``page_size``.
        mode: ``tokens`` pairs blocks of equal tokens, greedily from the left. If several blocks of ``src``
            match, it takes the block that continues the last pair (for the first pair: the block at the same
            offset), else the next matching block behind that place, else the first. A ``src`` block may be in
            several pairs. The time is linear, except for a binary search among equal blocks.
            ``index`` pairs the k-th blocks of both steps, whatever their tokens, as the papers do.
        covered: One byte per token of ``dst``: 1 if the token is already in a pair and must not be in another.
    """
    if mode == "index":
        starts = (block_starts(step, block, page_size) for step in (dst, src))
        return [
            BlockPair(i, j)
            for i, j in zip(*starts, strict=False)
            if covered.find(1, i - dst.start, i - dst.start + block) < 0
        ]
    first = -src.start % page_size
    # Maps the tokens of a block to the offsets of all equal blocks in ``src``, in ascending order.
    sources: dict[tuple[int, ...], list[int]] = {}
    for j in range(first, len(src) - block + 1, page_size):
        sources.setdefault(src.token_ids[j : j + block], []).append(j)
    pairs: list[BlockPair] = []
    i = -dst.start % page_size
    diagonal = first - i
    while i <= len(dst) - block:
        taken = covered.rfind(1, i, i + block)
        found = sources.get(dst.token_ids[i : i + block]) if taken < 0 else None
        if found is None:
            # Continue at the next page boundary, behind any covered tokens of this block.
            i += -(-max(1, taken + 1 - i) // page_size) * page_size
            continue
        at = bisect_left(found, i + diagonal)
        j = found[at] if at < len(found) else found[0]
        diagonal = j - i
        pairs.append(BlockPair(dst.start + i, src.start + j))
        i += block
    return pairs


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


class LexicalIndex:
    """The newest ``max_history_steps`` earlier steps of one request. Not thread safe.

    Older steps are no candidates, and do not count in the mean of the dynamic threshold. The index is
    inverted: to compare a step, only the posting lists of its tokens are read.
    """

    def __init__(self, max_history_steps: int, length_factor: bool = True) -> None:
        self._max_history_steps = max_history_steps
        self._length_factor = length_factor
        self._steps: deque[Step] = deque()
        self._num_chars, self._norm_sq = array("d"), array("d")
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
        hits = [(n, found) for t, n in step.bag.items() if (found := self._postings.get(t))]
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
            chars = np.array(self._num_chars)
            sims *= np.minimum(chars, step.num_chars)
            sims /= np.maximum(chars, step.num_chars)
        return sims
