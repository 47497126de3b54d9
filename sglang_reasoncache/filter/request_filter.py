# SPDX-License-Identifier: Apache-2.0
"""The filter of one request: takes the request's tokens, and proposes block pairs that may share KV slots."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sglang_reasoncache.filter.aging import AgeRule, StepAgeRule
from sglang_reasoncache.filter.lexical import StepIndex
from sglang_reasoncache.filter.matcher import (
    AcrossPair,
    BlockPair,
    FilterCounters,
    Matcher,
    RandomPairs,
)
from sglang_reasoncache.filter.runs import RunGroup, RunMatcher
from sglang_reasoncache.filter.segment import ReasoningSpan, Segmenter, Step, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.steps import StepMatcher
from sglang_reasoncache.filter.vocabulary import Vocabulary


class Proposal(NamedTuple):
    """A finished step, and the block pairs that may share slots from now on, ascending in ``dst_start``.

    These pairs may have been found at earlier steps and held back by :class:`AgeRule` until now.
    ``across``: pairs that were found by a search in the group, which is all requests with the same prompt.
    ``alternatives``: with ``align=nearest``, for each step that is old enough now, the pairs of which those
    with the least KV distance may share, no block in two of them. ``pairs`` is empty then.
    """

    step: Step
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    across: tuple[AcrossPair, ...] = ()
    alternatives: tuple[tuple[BlockPair, ...], ...] = ()


class RequestFilter:
    """Takes the tokens of one response and proposes blocks to share. Not thread safe.

    Args:
        classes: Token classes of ``vocabulary``.
        vocabulary: Decodes the tokens of a step to text.
        start_position: Position of the first output token, counted from the start of the prompt.
        span: Tells which tokens are reasoning. Each filter needs its own. None if all tokens are reasoning.
            A token outside reasoning ends the open step and is never paired, but advances ``position``.
        prompt: The prompt's tokens if blocks of the response may read them.
        history: With ``match=steps``, compares steps; None compares their counts of tokens.

    Attributes:
        position: Position of the next token.
    """

    def __init__(
        self,
        config: FilterConfig,
        classes: TokenClasses,
        vocabulary: Vocabulary,
        start_position: int,
        span: ReasoningSpan | None = None,
        prompt: Sequence[int] = (),
        history: StepIndex | None = None,
    ) -> None:
        self._span = span
        self._segmenter = Segmenter(classes, config.longest_step)
        self.position = start_position
        # Tokens of the open step; empty between two steps.
        self._open_tokens: list[int] = []
        self._matcher: Matcher
        if config.random_ratio is not None:
            # This seed is the same on all ranks, and differs between prompts of different lengths.
            self._matcher = RandomPairs(config, seed=start_position)
        elif config.match == "runs":
            self._matcher = RunMatcher(config, start_position, prompt)
        else:
            self._matcher = StepMatcher(config, classes, vocabulary, history)
        self._age_rule = AgeRule(config, start_position)
        is_nearest = isinstance(self._matcher, StepMatcher) and config.align == "nearest"
        self._step_age_rule = StepAgeRule(config) if is_nearest else None

    def join(self, member: int, group: RunGroup | None) -> None:
        """See :meth:`RunMatcher.join`. Other matchers ignore the call."""
        self._matcher.join(member, group)

    def push(self, token_ids: Sequence[int]) -> list[Proposal]:
        """Take newly written tokens, in order. Returns one proposal per finished step."""
        return [self.propose(step) for step in self.steps(token_ids)]

    def steps(self, token_ids: Sequence[int]) -> Iterator[Step]:
        """Take newly written tokens. Yields each step when its end is known.

        The caller may pass a step to :meth:`propose` before asking for the next step. A step that is
        not passed on is never paired.
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
                # A token that is not part of the finished step starts the next step.
                (finished if span[1] > position else tokens).append(token)
            yield self._matcher.build(span[0], finished)

    def propose(self, step: Step) -> Proposal:
        """Returns ``step`` with the block pairs that may share slots from now on. ``step`` is the step that
        :meth:`steps` yielded last. Blocks of later steps may then be paired with its blocks."""
        matcher = self._matcher
        matches = matcher.propose(step)
        if self._step_age_rule is not None:
            ready = self._step_age_rule.release(matches, step.end)
            return Proposal(step, (), matcher.counters, alternatives=tuple(ready))
        pairs = self._age_rule.release(matches, step.end)
        across = matcher.across()
        pairs = sorted([*pairs, *matcher.quoted()])
        return Proposal(step, tuple(pairs), matcher.counters, tuple(across))
