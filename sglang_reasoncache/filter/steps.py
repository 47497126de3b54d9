# SPDX-License-Identifier: Apache-2.0
"""Pairs blocks of a step (text between blank lines) with blocks of similar earlier steps: stage 1 of the
ReasonCache paper. Stage 2 compares the KV of each pair. It is in ``sharing/``, because the KV is on the device.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from sglang_reasoncache.filter.lexical import LexicalIndex, StepIndex, dynamic_threshold
from sglang_reasoncache.filter.matcher import BlockPair, FilterCounters, Matcher, block_starts
from sglang_reasoncache.filter.segment import BLANK, Step, TokenClasses
from sglang_reasoncache.filter.settings import AlignMode, FilterConfig
from sglang_reasoncache.filter.structure import Signature, same_structure, signature
from sglang_reasoncache.filter.vocabulary import Vocabulary

#: A step is compared with at most so many others by edit distance, which takes up to 20 ms. A poll may bring
#: 256 steps, and a filter that is silent for half a minute is taken to hang.
_MOST_DISTANCES = 4


class StepMatcher(Matcher):
    """Compares each step of a response with the ``max_history_steps`` steps before it."""

    def __init__(
        self,
        config: FilterConfig,
        classes: TokenClasses,
        vocabulary: Vocabulary,
        history: StepIndex | None = None,
    ) -> None:
        """``history``: compares steps; None compares their counts of tokens."""
        self._config = config
        self._classes = classes
        self._vocabulary = vocabulary
        self._in_code = False
        if history is None:
            history = LexicalIndex(config.max_history_steps, config.length_factor)
        self._history = history
        # How many more characters of earlier steps may be parsed for the current step.
        self._readable = 0
        # With how many more it may be compared by edit distance.
        self._distances = 0

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
        similar = self._similar(step, self._candidates(step))
        align = self._alternatives if self._config.align == "nearest" else self._align
        pairs = align(step, similar) if len(step) >= self._config.block else []
        self._history.add(step)
        if not self._config.use_structure:
            step.text = ""  # not needed any more
        return pairs

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
        best: list[int] = order[: config.max_structure_checks].tolist()
        return best

    def _similar(self, step: Step, candidates: list[int]) -> Iterator[Step]:
        """The best candidates that pass the structure check, at most ``max_candidates``. Each is checked when
        it is asked for."""
        config = self._config
        num_passed = 0
        self._readable = config.limits.max_chars // 2
        self._distances = _MOST_DISTANCES
        for index in candidates:
            if num_passed == config.max_candidates:
                break
            earlier = self._history[index]
            if config.use_structure and not self._passes(step, earlier):
                continue
            num_passed += 1
            yield earlier

    def _align(self, step: Step, similar: Iterator[Step]) -> list[BlockPair]:
        """Pair blocks of ``step`` with blocks of similar steps, each only with blocks still unpaired."""
        config = self._config
        pairs: list[BlockPair] = []
        covered = bytearray(len(step))
        for earlier in similar:
            left = config.max_blocks_per_step - len(pairs)
            matches = align_blocks(step, earlier, config.block, config.align, covered)
            for dst, src in matches[:left]:
                pairs.append(BlockPair(dst, src))
                at = dst - step.start
                covered[at : at + config.block] = b"\x01" * config.block
            if len(pairs) >= config.max_blocks_per_step or covered.count(0) < config.block:
                break
        pairs.sort()
        return pairs

    def _alternatives(self, step: Step, similar: Iterator[Step]) -> list[BlockPair]:
        """The pairs among which KV distances choose. A further similar step is used only while those before it
        have fewer blocks than ``step``."""
        config = self._config
        starts = block_starts(step, config.block)
        sources: list[int] = []
        for earlier in similar:
            sources += block_starts(earlier, config.block)
            if len(sources) >= len(starts):
                break
        return alternatives_of(starts, sources, config.max_blocks_per_step)

    def _passes(self, step: Step, earlier: Step) -> bool:
        if earlier.signature is None:
            # Once the limit for this step is used up, no more earlier steps are parsed.
            if self._readable <= 0:
                return False
            self._readable -= len(earlier.text)
        this = self._signature(step)
        other = self._signature(earlier)
        if same_structure(this, other):
            return True
        tolerance = self._config.structure_tolerance
        if tolerance > 0 and self._distances > 0:
            self._distances -= 1
            if same_structure(this, other, tolerance, self._config.limits):
                return True
        self.counters.dropped_structure += not (this.bound or other.bound)
        return False

    def _signature(self, step: Step) -> Signature:
        """The parsed mathematics and code of ``step``. Parsed on first use: most steps never need this."""
        if step.signature is None:
            step.signature = signature(step.text, self._config.limits, in_code=step.in_code)
            step.text = ""  # only the signature is needed from now on
            self.counters.over_bound += bool(step.signature.bound)
        return step.signature


def alternatives_of(starts: Sequence[int], sources: Sequence[int], most: int) -> list[BlockPair]:
    """Pairs each block with every source, ascending; the KV distances, which only the scheduler knows, decide
    which pairs share (MemShare). If that makes more than ``most`` pairs, each block gets equally many sources,
    those around its own index.

    Args:
        starts: First positions of a step's blocks.
        sources: First positions of the blocks that they may be paired with.
    """
    some = starts[:most]
    if not some or not sources:
        return []
    width = min(len(sources), most // len(some))
    pairs: list[BlockPair] = []
    for index, start in enumerate(some):
        first = min(max(0, index - width // 2), len(sources) - width)
        pairs += [BlockPair(start, source) for source in sources[first : first + width]]
    return pairs


def align_blocks(
    dst: Step,
    src: Step,
    block: int,
    mode: AlignMode = "tokens",
    covered: bytes | bytearray = b"",
) -> list[BlockPair]:
    """Pair blocks of ``dst`` with blocks of ``src``. The pairs are sorted by ``dst_start``, and their
    ``dst`` blocks do not overlap.

    Args:
        block: Tokens per block.
        mode: ``tokens`` pairs blocks of equal tokens, greedily from the left. If several blocks of ``src``
            match, it takes the block that continues the last pair (for the first pair: the block at the same
            offset), else the next matching block behind that place, else the first. A ``src`` block may be in
            several pairs. The time is linear, except for a binary search among equal blocks.
            ``index`` pairs the k-th blocks of both steps, whatever their tokens, as the papers do.
        covered: One byte per token of ``dst``: 1 if the token is already in a pair and must not be in another.
    """
    if mode == "index":
        starts = (block_starts(step, block) for step in (dst, src))
        return [
            BlockPair(i, j)
            for i, j in zip(*starts, strict=False)
            if covered.find(1, i - dst.start, i - dst.start + block) < 0
        ]
    # Maps the tokens of a block to the offsets of all equal blocks in ``src``, in ascending order.
    sources: dict[tuple[int, ...], list[int]] = {}
    for j in range(len(src) - block + 1):
        sources.setdefault(src.token_ids[j : j + block], []).append(j)
    pairs: list[BlockPair] = []
    i = diagonal = 0
    while i <= len(dst) - block:
        taken = covered.rfind(1, i, i + block)
        offsets = sources.get(dst.token_ids[i : i + block]) if taken < 0 else None
        if offsets is None:
            # Continue behind any covered tokens of this block.
            i += max(1, taken + 1 - i)
            continue
        at = bisect_left(offsets, i + diagonal)
        j = offsets[at] if at < len(offsets) else offsets[0]
        diagonal = j - i
        pairs.append(BlockPair(dst.start + i, src.start + j))
        i += block
    return pairs
