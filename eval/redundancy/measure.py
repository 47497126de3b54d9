# SPDX-License-Identifier: Apache-2.0
"""Counts over responses, with the production filter."""

from collections import Counter
from typing import Any

from eval.redundancy.spelling import Spelled
from sglang_reasoncache.filter.lexical import LexicalIndex
from sglang_reasoncache.filter.proposal import Proposal
from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.segment import ReasoningSpan

BLOCKS = (4, 8, 16)
LEVELS = (0.8, 0.9)
#: Bins of the distribution of best similarities over [0, 1].
BINS = 100
#: Similarities, and whether they have the length factor.
SIMILARITIES = {"with_length_factor": True, "plain_cosine": False}
#: Which candidates' blocks are shared, and whether formal content must agree.
RULES = {"candidate": False, "structure": True}

#: Sums over responses: of ``steps`` (a last one without a blank line behind it included)
#: ``later_steps`` have an earlier one, ``candidates`` one over the dynamic threshold; ``(similarity,
#: level)`` later steps whose best similarity exceeds it, ``(similarity, bin)`` their histogram;
#: ``(rule, block)`` tokens in proposed blocks at the end, ``(rule, block, "over_time")`` and
#: ``held_over_time`` (all tokens so far) summed over decode steps.
Totals = Counter[Any]


def measure(spelled: Spelled) -> Totals:
    """Totals of one response."""
    tokens = len(spelled.token_ids)
    found: Totals = Counter(responses=1, tokens=tokens, held_over_time=tokens * (tokens + 1) // 2)
    proposals: list[Proposal] = []
    for rule, structure in RULES.items():
        for block in BLOCKS:
            proposals = propose(spelled, FilterConfig(block=block, use_structure=structure))
            for proposal in proposals:
                size = block * len(proposal.pairs)
                found[rule, block] += size
                # Shared from the token that ends the step on.
                found[rule, block, "over_time"] += size * (tokens - proposal.step.end + 1)
    # Similarities do not depend on the rule.
    history = FilterConfig().max_history_steps
    indexes = {name: LexicalIndex(history, factor) for name, factor in SIMILARITIES.items()}
    for proposal in proposals:
        found["steps"] += 1
        found["later_steps"] += proposal.counters.steps_compared
        found["candidates"] += proposal.counters.steps_with_candidates
        step = spelled.bagged(proposal.step)
        for name, index in indexes.items():
            if len(index):
                best = float(index.similarities(step).max())
                found[name, min(int(best * BINS), BINS - 1)] += 1
                for level in LEVELS:
                    found[name, level] += best > level
            index.add(step)
    return found


def propose(spelled: Spelled, config: FilterConfig) -> list[Proposal]:
    """What the filter proposes for each finished step."""
    end = len(spelled.vocabulary.pieces)  # an id that no token has
    span = ReasoningSpan(frozenset(), frozenset({end}), inside=True)
    request = RequestFilter(config, spelled.classes, spelled.vocabulary, 0, span)
    # The marker finishes the last step.
    return [*request.push(spelled.token_ids), *request.push([end])]
