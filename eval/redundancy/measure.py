# SPDX-License-Identifier: Apache-2.0
"""Counts over responses, with the production filter."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eval.redundancy.spelling import Spelled
from sglang_reasoncache.filter.lexical import LexicalIndex
from sglang_reasoncache.filter.proposal import Proposal
from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.span import ReasoningSpan

BLOCKS = (4, 8, 16)
LEVELS = (0.8, 0.9)
#: Bins of the distribution of best similarities.
BINS = 100

#: With the length factor or without.
Measure = bool
#: Block size, and whether formal content must agree.
Rule = tuple[int, bool]
RULES: tuple[Rule, ...] = tuple(
    (block, structure) for structure in (False, True) for block in BLOCKS
)


@dataclass
class Totals:
    """Sums over responses; of constant size.

    Attributes:
        responses: how many.
        tokens: of them, in all.
        steps: finished ones, a last one without a blank line behind it included.
        later_steps: those with an earlier step in their response.
        over: later steps whose best earlier similarity exceeds a level, by
            (with length factor, level).
        best: histograms of the best similarities over [0, 1], by length factor.
        candidates: later steps with an earlier one over the dynamic threshold.
        shared: tokens in proposed blocks when responses end.
        shared_over_time: the same, summed over all decode steps.
        held_over_time: tokens of responses so far, summed over all decode steps.
    """

    responses: int = 0
    tokens: int = 0
    steps: int = 0
    later_steps: int = 0
    over: dict[tuple[Measure, float], int] = field(
        default_factory=lambda: {(factor, level): 0 for factor in (True, False) for level in LEVELS}
    )
    best: dict[Measure, npt.NDArray[np.int64]] = field(
        default_factory=lambda: {factor: np.zeros(BINS, np.int64) for factor in (True, False)}
    )
    candidates: int = 0
    shared: dict[Rule, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    shared_over_time: dict[Rule, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    held_over_time: int = 0

    def add(self, other: Totals) -> None:
        """Accumulate other responses into this."""
        for name in ("responses", "tokens", "steps", "later_steps", "candidates", "held_over_time"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key in self.over:
            self.over[key] += other.over[key]
        for factor in self.best:
            self.best[factor] += other.best[factor]
        for rule in RULES:
            self.shared[rule] += other.shared[rule]
            self.shared_over_time[rule] += other.shared_over_time[rule]


def measure(spelled: Spelled) -> Totals:
    """Totals of one response."""
    tokens = len(spelled.token_ids)
    found = Totals(responses=1, tokens=tokens, held_over_time=tokens * (tokens + 1) // 2)
    for block, structure in RULES:
        proposals = _proposals(spelled, FilterConfig(block=block, use_structure=structure))
        for proposal in proposals:
            size = block * len(proposal.pairs)
            found.shared[block, structure] += size
            # Shared from the token that ends the step on.
            found.shared_over_time[block, structure] += size * (tokens - proposal.step.end + 1)
        if (block, structure) == RULES[0]:
            _add_similarities(found, spelled, proposals)
    return found


def _proposals(spelled: Spelled, config: FilterConfig) -> list[Proposal]:
    end = spelled.vocabulary.size  # an id that no token has
    span = ReasoningSpan(frozenset(), frozenset({end}), inside=True)
    request = RequestFilter(config, spelled.classes, spelled.vocabulary, 0, span)
    # The marker finishes the last step.
    return [*request.push(spelled.token_ids), *request.push([end])]


def _add_similarities(found: Totals, spelled: Spelled, proposals: list[Proposal]) -> None:
    """Best similarity of each step to an earlier one, whatever the threshold."""
    history = FilterConfig().max_history_steps
    indexes = {factor: LexicalIndex(history, factor) for factor in (True, False)}
    for proposal in proposals:
        found.steps += 1
        found.later_steps += proposal.counters.steps_compared
        found.candidates += proposal.counters.steps_with_candidates
        step = spelled.bagged(proposal.step)
        for factor, index in indexes.items():
            if len(index):
                best = float(index.similarities(step).max())
                found.best[factor][min(int(best * BINS), BINS - 1)] += 1
                for level in LEVELS:
                    found.over[factor, level] += best > level
            index.add(step)
