# SPDX-License-Identifier: Apache-2.0
"""The filter of one request: tokens in, proposed block pairs out."""

from collections.abc import Iterator, Sequence

from sglang_reasoncache.filter.aging import AgeRule
from sglang_reasoncache.filter.matcher import Matcher, RandomPairs
from sglang_reasoncache.filter.proposal import Proposal
from sglang_reasoncache.filter.runs import RunGroup, RunMatcher
from sglang_reasoncache.filter.segment import ReasoningSpan, Segmenter, Step, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.steps import StepMatcher
from sglang_reasoncache.filter.vocabulary import Vocabulary


class RequestFilter:
    """Takes the tokens of one response and proposes blocks to share. Not thread safe.

    Args:
        classes: Token classes of ``vocabulary``.
        vocabulary: Gives the text of steps.
        start_position: Position, in prompt plus output, of the first token to come.
        span: Tells which tokens are reasoning; a new object, used by this filter only. None: all tokens are
            reasoning. A token that is not ends the open step and advances the position.

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
    ) -> None:
        self._span = span
        self._segmenter = Segmenter(classes, config.max_step_tokens)
        self.position = start_position
        # Tokens of the open step; empty between two steps.
        self._open_tokens: list[int] = []
        self._matcher: Matcher
        if config.random_ratio is not None:
            # The seed differs between requests and is the same on all ranks.
            self._matcher = RandomPairs(config, config.seed * 1_000_003 + start_position)
        elif config.match == "runs":
            self._matcher = RunMatcher(config, start_position)
        else:
            self._matcher = StepMatcher(config, classes, vocabulary)
        self._age_rule = AgeRule(config)

    def join(self, member: int, group: RunGroup | None) -> None:
        """See :meth:`RunMatcher.join`. Other matchers do nothing."""
        self._matcher.join(member, group)

    def push(self, token_ids: Sequence[int]) -> list[Proposal]:
        """Take newly written tokens, in order. Returns one proposal per finished step."""
        return [self.propose(step) for step in self.steps(token_ids)]

    def steps(self, token_ids: Sequence[int]) -> Iterator[Step]:
        """Take newly written tokens. Yields each step when its last token is taken.

        The caller may pass a step to :meth:`propose` before it asks for the next one. A step that it
        does not pass on is treated as if it had not been written.
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
                # A token behind the end of the step starts the next one.
                (finished if span[1] > position else tokens).append(token)
            yield self._matcher.build(span[0], finished)

    def propose(self, step: Step) -> Proposal:
        """Block pairs that may share now. ``step``: the step that :meth:`steps` yielded last. Later steps may
        then be paired with it."""
        matcher = self._matcher
        pairs = self._age_rule.release(matcher.propose(step), step.end)
        return Proposal(step, tuple(pairs), matcher.counters, tuple(matcher.across()))
