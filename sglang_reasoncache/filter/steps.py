# SPDX-License-Identifier: Apache-2.0
"""Pairs blocks of a step with blocks of similar earlier steps: stage 1 of ReasonCache, and its alignment
of blocks. Stage 2, the distance of their K and V, is in ``sharing/``, because it needs the device."""

from collections.abc import Sequence

import numpy as np

from sglang_reasoncache.filter.align import BlockPair, align_blocks
from sglang_reasoncache.filter.lexical import LexicalIndex, dynamic_threshold
from sglang_reasoncache.filter.matcher import Matcher
from sglang_reasoncache.filter.proposal import FilterCounters
from sglang_reasoncache.filter.segment import BLANK, Step, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.structure.signature import Signature, same_structure, signature
from sglang_reasoncache.filter.vocabulary import Vocabulary


class StepMatcher(Matcher):
    """Compares each step of one response with the ``max_history_steps`` before it."""

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
        """Indexes in the history of steps above the threshold: most similar first, then newest first."""
        if not len(self._history):
            return []
        config = self._config
        sims = self._history.similarities(step)
        tau = config.fixed_tau
        if tau is None:
            tau = dynamic_threshold(sims, config.strict, config.soft)
        above = np.flatnonzero(sims > tau)
        self.counters.candidates = len(above)
        # Reversed before the stable sort, so that the latest of equal similarities comes first.
        order = above[::-1]
        order = order[np.argsort(-sims[order], kind="stable")]
        kept = order[: config.max_structure_checks]
        return [int(index) for index in kept]

    def _align(self, step: Step, candidates: list[int]) -> list[BlockPair]:
        """Block pairs of the best candidates that pass the structure check."""
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
            # Only a bounded number of characters of earlier steps is parsed for one step.
            if self._readable <= 0:
                return False
            self._readable -= len(earlier.text)
        a, b = self._signature(step), self._signature(earlier)
        if same_structure(a, b, self._config.structure_tolerance, self._config.limits):
            return True
        self.counters.dropped_structure += not (a.bound or b.bound)
        return False

    def _signature(self, step: Step) -> Signature:
        """The step's signature. It is parsed on first use, because most steps never become a candidate."""
        if step.signature is None:
            step.signature = signature(step.text, self._config.limits, in_code=step.in_code)
            step.text = ""  # only the signature is needed from now on
            self.counters.over_bound += bool(step.signature.bound)
        return step.signature
