# SPDX-License-Identifier: Apache-2.0
"""The step filter of one request: tokens in, proposed block pairs out.

Stage 1 of ReasonCache with the alignment of blocks. Stage 2, the distance of the block pairs'
K and V, needs the device and happens elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from sglang_reasoncache.filter.aging import AgeRule
from sglang_reasoncache.filter.align import BlockPair, RandomPairs, align_blocks
from sglang_reasoncache.filter.encoder import DenseIndex, StepEncoder
from sglang_reasoncache.filter.lexical import LexicalIndex, dynamic_threshold
from sglang_reasoncache.filter.proposal import FilterCounters, Proposal
from sglang_reasoncache.filter.runs import RunMatcher
from sglang_reasoncache.filter.segment import BLANK, ReasoningSpan, Segmenter, Step, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.structure.signature import (
    Signature,
    leaves_fence_open,
    same_structure,
    signature,
)
from sglang_reasoncache.filter.vocabulary import Vocabulary

__all__ = ["FilterConfig", "FilterCounters", "Proposal", "RequestFilter"]


class RequestFilter:
    """Feeds on one response's tokens and proposes blocks to share. Not thread safe.

    Holds at most ``max_history_steps`` steps and one unfinished one.

    Args:
        config: the knobs.
        classes: token classes of ``vocabulary``.
        vocabulary: spells the steps.
        start_position: logical position of the first token to come.
        span: which tokens are reasoning, fresh and this filter's own; None: all of them. Other
            tokens only advance the position, and a marker ends the open step.
        encoder: of the steps, one for all requests; None: counts of token ids.

    Attributes:
        position: logical position of the next token to be pushed.
        counters: sums over everything proposed so far.

    Raises:
        ValueError: the config asks for another encoder than ``tokens``, and there is none.
    """

    def __init__(
        self,
        config: FilterConfig,
        classes: TokenClasses,
        vocabulary: Vocabulary,
        start_position: int,
        span: ReasoningSpan | None = None,
        encoder: StepEncoder | None = None,
    ) -> None:
        self._config = config
        self._classes = classes
        self._vocabulary = vocabulary
        self._span = span
        self._segmenter = Segmenter(classes, config.max_step_tokens)
        self.position = start_position
        # Tokens of the open step; empty between two steps.
        self._open_tokens: list[int] = []
        self._in_code = False
        self._history: LexicalIndex
        if encoder is None:
            if config.encoder != "tokens" and config.random_ratio is None:
                raise ValueError(f"--reasoncache-encoder {config.encoder} was not built")
            self._history = LexicalIndex(config.max_history_steps, config.length_factor)
        else:
            self._history = DenseIndex(encoder, config.max_history_steps, config.length_factor)
        #: Instead of similar steps.
        self._matcher: RandomPairs | RunMatcher | None = None
        if config.random_ratio is not None:
            # Requests differ, ranks agree.
            self._matcher = RandomPairs(config, config.seed * 1_000_003 + start_position)
        elif config.match == "runs":
            self._matcher = RunMatcher(config, start_position)
        self._age_rule = AgeRule(config)
        # Characters of earlier steps that may still be read for the step at hand.
        self._readable = 0
        self.counters = FilterCounters()

    def push(self, token_ids: Sequence[int]) -> list[Proposal]:
        """Take newly written tokens, in order; one proposal per finished step."""
        return [self.propose(step) for step in self.steps(token_ids)]

    def steps(self, token_ids: Sequence[int]) -> Iterator[Step]:
        """Take newly written tokens; finished steps, as the tokens complete them.

        A step that is not given to :meth:`propose` is as if it had not been written.
        """
        push = self._segmenter.push
        tokens = self._open_tokens
        reasoning = self._span
        for token in token_ids:
            position = self.position
            self.position = position + 1
            is_reasoning = reasoning is None or reasoning.push(token)
            span = push(token, position) if is_reasoning else self._segmenter.close(position)
            if span is None:
                if is_reasoning and self._segmenter.start is not None:
                    tokens.append(token)
                continue
            finished = tokens.copy()
            tokens.clear()
            if is_reasoning:
                # A token that the step does not include starts the next one.
                (finished if span[1] > position else tokens).append(token)
            yield self._build(span[0], finished)

    def _build(self, start: int, tokens: list[int]) -> Step:
        if self._matcher is not None:
            return Step.build(start, tokens, "")
        num_blank_tail = 0
        while self._classes(tokens[-1 - num_blank_tail]) & BLANK:
            num_blank_tail += 1
        text = self._vocabulary.text(tokens)
        step = Step.build(start, tokens, text, num_blank_tail, self._in_code)
        self._in_code = leaves_fence_open(text, self._in_code)
        return step

    def propose(self, step: Step) -> Proposal:
        """Block pairs of the step that :meth:`steps` gave last, which becomes an earlier one."""
        counters = FilterCounters(steps=1)
        config = self._config
        if self._matcher is not None:
            found = self._matcher.propose(step)
            counters.candidates = len(found)
            counters.steps_with_candidates = int(bool(found))
        else:
            found = self._align(step, self._candidates(step, counters), counters)
            self._history.add(step)
            if not config.use_structure:
                step.text = ""  # nobody will read it any more
        pairs = self._age_rule.release(found, step.end)
        counters.pairs = len(pairs)
        counters.steps_with_pairs = int(bool(found))
        self.counters.add(counters)
        return Proposal(step, tuple(pairs), counters)

    def _candidates(self, step: Step, counters: FilterCounters) -> list[tuple[float, int]]:
        """(similarity, index in the history), most similar first, of equals the most recent."""
        if not len(self._history):
            return []
        counters.steps_compared = 1
        config = self._config
        sims = self._history.similarities(step)
        tau = config.fixed_tau
        if tau is None:
            tau = dynamic_threshold(sims, config.strict, config.soft)
        above = np.flatnonzero(sims > tau)
        counters.candidates = len(above)
        counters.steps_with_candidates = int(len(above) > 0)
        # Stable sort of the reversed order: equal similarities, latest first.
        order = above[::-1]
        order = order[np.argsort(-sims[order], kind="stable")]
        kept = order[: config.max_structure_checks]
        counters.dropped_excess = len(above) - len(kept)
        return list(zip(sims[kept].tolist(), kept.tolist(), strict=True))

    def _align(
        self, step: Step, candidates: list[tuple[float, int]], counters: FilterCounters
    ) -> list[BlockPair]:
        """Block pairs of the best candidates that pass the structure check."""
        config = self._config
        pairs: list[BlockPair] = []
        covered = bytearray(len(step))
        num_used = 0
        self._readable = config.limits.max_chars // 2
        for rank, (_similarity, index) in enumerate(candidates):
            left = config.max_blocks_per_step - len(pairs)
            if num_used == config.max_candidates or left <= 0 or covered.count(0) < config.block:
                counters.dropped_excess += len(candidates) - rank
                break
            earlier = self._history[index]
            if config.use_structure and not self._passes(step, earlier, counters):
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

    def _passes(self, step: Step, earlier: Step, counters: FilterCounters) -> bool:
        if earlier.signature is None:
            # Steps that were no candidates yet are not all read in one go.
            if self._readable <= 0:
                counters.dropped_excess += 1
                return False
            self._readable -= len(earlier.text)
        a, b = self._signature(step, counters), self._signature(earlier, counters)
        if same_structure(a, b, self._config.structure_tolerance, self._config.limits):
            return True
        if a.bound or b.bound:
            counters.dropped_over_bound += 1
        else:
            counters.dropped_structure += 1
        return False

    def _signature(self, step: Step, counters: FilterCounters) -> Signature:
        """Read on first need: most steps never become a candidate."""
        if step.signature is None:
            step.signature = signature(
                step.text,
                self._config.limits,
                in_code=step.in_code,
                keep_trees=self._config.structure_tolerance > 0,
            )
            step.text = ""  # the signature is all that is asked of it from now on
            counters.over_bound += bool(step.signature.bound)
        return step.signature
