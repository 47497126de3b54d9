# SPDX-License-Identifier: Apache-2.0
"""The whole filter against a slow reference, and its choices one by one."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.align import BlockPair, align_blocks
from sglang_reasoncache.filter.request_filter import (
    FilterConfig,
    FilterCounters,
    Proposal,
    RequestFilter,
)
from sglang_reasoncache.filter.structure.signature import same_structure, signature
from sglang_reasoncache.filter.structure.tree import Limits
from tests.filter.test_lexical import slow_cosine
from tests.filter.words import Words, filter_knobs, with_length_factor

_PHRASES = (
    "line c = a + 3 . here a 4 . 4 + 3 = 7 , so c 7 , now next .",
    "line c = a + 3 . here a 4 . 4 + 3 = 8 , so c 8 , now next .",
    "we look at that again because it was not clear at all before , wait .",
    "we look at it again because that was not clear at all before , wait .",
    "wait . we look at it again because that was not clear .",
    "the value of \\( x \\) is 5 and that is all we need to know here .",
    "```\nfor i in range ( 3 ) :\n    total = total + i\n```",
)


def make(words: Words, start: int = 0, **knobs: Any) -> RequestFilter:
    return RequestFilter(FilterConfig(**knobs), words.classes, words.vocabulary, start)


def response(phrases: list[str]) -> str:
    return "".join(f"{phrase} \n\n " for phrase in phrases)


def slow_filter(words: Words, phrases: list[str], config: FilterConfig) -> list[list[BlockPair]]:
    """Stage 1 by the paper's text: every earlier step, one after the other."""
    unshared = RequestFilter(
        FilterConfig(max_step_tokens=10_000), words.classes, words.vocabulary, 0
    )
    steps = [proposal.step for proposal in unshared.push(words.encode(response(phrases)))]
    found = []
    for k, step in enumerate(steps):
        # Without the delimiter, as the papers split: one token of each step.
        earlier = [_without_delimiter(step, words) for step in steps[:k]]
        this = _without_delimiter(step, words)
        sims = [slow_cosine(this, other) for other in earlier]
        if config.length_factor:
            sims = [with_length_factor(*each, this) for each in zip(sims, earlier, strict=True)]
        tau = config.fixed_tau
        if tau is None:
            mean = sum(sims) / len(sims) if sims else 0.0
            tau = config.strict - (config.strict - config.soft) * mean
        order = sorted((-sim, -j) for j, sim in enumerate(sims) if sim > tau)
        covered, pairs, num_used = bytearray(len(step)), [], 0
        for _, minus_j in order:
            source = steps[-minus_j]
            a, b = (signature(words.decode(list(each.token_ids))) for each in (step, source))
            if config.use_structure and not same_structure(a, b):
                continue
            if num_used == config.max_candidates:
                break
            num_used += 1
            for dst, src in align_blocks(step, source, config.block, 1, config.align, covered):
                pairs.append(BlockPair(dst, src))
                for i in range(dst - step.start, dst - step.start + config.block):
                    covered[i] = 1
        found.append(sorted(pairs))
    return found


def _without_delimiter(step: Any, words: Words) -> Any:
    return dataclasses.replace(step, token_ids=step.token_ids[:-1])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from(_PHRASES), min_size=2, max_size=10),
    st.sampled_from(["reasoncache", "memshare", "cosine", "cosine-structure"]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.data(),
)
def test_same_pairs_as_the_slow_reference(
    phrases: list[str], preset: str, block: int, max_candidates: int, data: st.DataObject
) -> None:
    """However the tokens arrive, in ones or all at once."""
    words = Words()
    token_ids = words.encode(response(phrases))
    knobs: dict[str, Any] = filter_knobs(preset)
    knobs |= {"block": block, "max_candidates": max_candidates}
    request = make(words, **knobs)
    proposals: list[Proposal] = []
    position = 0
    while position < len(token_ids):
        size = data.draw(st.integers(1, 40))
        proposals += request.push(token_ids[position : position + size])
        position += size
    expected = slow_filter(words, phrases, FilterConfig(**knobs))
    for proposal, pairs in zip(proposals, expected, strict=True):
        assert list(proposal.pairs) == pairs
    assert request.position == len(token_ids)
    total = FilterCounters()
    for proposal in proposals:
        total.add(proposal.counters)
    assert total == request.counters
    assert total.steps == len(phrases)
    assert total.pairs == sum(map(len, expected))


def test_positions_are_logical_and_the_delimiter_belongs_to_the_step() -> None:
    words = Words()
    request = make(words, start=100, block=3)
    proposals = request.push(words.encode(response([_PHRASES[2], _PHRASES[2]])))
    first, second = (proposal.step for proposal in proposals)
    assert (first.start, first.end, second.start) == (100, 117, 117)
    assert words.decode(list(first.token_ids)) == _PHRASES[2] + " \n\n"
    assert proposals[0].pairs == ()
    assert proposals[1].pairs == tuple((117 + 3 * k, 100 + 3 * k) for k in range(5))


def test_a_differing_number_is_not_shared_unless_structure_is_off() -> None:
    for use_structure, num_evicted in ((True, 1), (False, 0)):
        words = Words()
        request = make(words, block=4, use_structure=use_structure)
        request.push(words.encode(response([_PHRASES[0], _PHRASES[1]])))
        assert request.counters.candidates == 1
        assert request.counters.dropped_structure == num_evicted
        assert (request.counters.pairs == 0) == use_structure


def test_the_most_recent_of_equal_candidates_wins() -> None:
    words = Words()
    request = make(words, block=16)
    proposal = request.push(words.encode(response([_PHRASES[2]] * 3)))[-1]
    assert [pair.src_start for pair in proposal.pairs] == [17]


def test_a_later_candidate_fills_what_the_first_left_open() -> None:
    words = Words()
    request = make(words, block=6, use_structure=False, soft=0.5, strict=0.5)
    steps = ["a b c d e f X h i j k l", "a b c d e f g h X j k l", "a b c d e f g h i j k l"]
    pairs = request.push(words.encode(response(steps)))[-1].pairs
    # The more recent of the two equally similar steps gives its first block,
    # the other one nothing more: its only other equal block is covered.
    assert [(pair.dst_start, pair.src_start) for pair in pairs] == [(26, 13), (33, 7)]


@pytest.mark.parametrize("align", ["tokens", "index"])
def test_whole_pages(align: str) -> None:
    words = Words()
    request = make(words, start=6, block=4, page_size=4, align=align)
    # Two steps of 16 tokens: the second lies on the same page phase.
    proposal = request.push(words.encode(response([_PHRASES[2][:-2]] * 2)))[-1]
    assert [pair[:2] for pair in proposal.pairs] == [(24, 8), (28, 12), (32, 16)]


def test_bounds_on_blocks_candidates_and_checks() -> None:
    words = Words()
    text = response([_PHRASES[2]] * 5)
    request = make(words, block=2, max_blocks_per_step=3)
    assert len(request.push(words.encode(text))[-1].pairs) == 3
    request = make(words, block=2, max_structure_checks=2)
    last = request.push(words.encode(text))[-1]
    assert (last.counters.candidates, last.counters.dropped_excess) == (4, 3)


@pytest.mark.parametrize(("max_candidates", "sources"), [(1, [13]), (2, [0, 13])])
def test_sources_of_one_step_are_bounded(max_candidates: int, sources: list[int]) -> None:
    """Each of two earlier steps holds one half of the third."""
    words = Words()
    halves = ["a b c d e f m n o p q r", "s t u v w x g h i j k l", "a b c d e f g h i j k l"]
    request = make(
        words, block=6, strict=0.4, soft=0.4, use_structure=False, max_candidates=max_candidates
    )
    pairs = request.push(words.encode(response(halves)))[-1].pairs
    assert [pair.src_start - pair.src_start % 13 for pair in pairs] == sources


def test_a_step_over_a_bound_shares_nothing() -> None:
    words = Words()
    request = make(words, block=2, limits=Limits(max_chars=30))
    proposals = request.push(words.encode(response([_PHRASES[2]] * 2)))
    assert proposals[1].pairs == ()
    assert proposals[1].counters.dropped_over_bound == 1
    assert proposals[1].counters.over_bound == 2
    found = proposals[1].step.signature
    assert found is not None and found.bound


def test_code_after_a_blank_line_inside_a_fence_is_code() -> None:
    """The second step has no fence of its own and would read as prose."""
    words = Words()
    request = make(words, block=2)
    opened = "``` python\nx = 1"
    text = response([opened, "return total later", "return total later", "```"])
    proposals = request.push(words.encode(text))
    assert [proposal.step.in_code for proposal in proposals] == [False, True, True, True]
    found = proposals[2].step.signature
    assert found is not None and found.digest
    assert not request.push(words.encode(response(["after"])))[0].step.in_code


def test_structure_tolerance_reaches_the_filter() -> None:
    words = Words()
    for tolerance, shares in ((1, False), (2, True)):
        request = make(words, block=4, structure_tolerance=tolerance)
        request.push(words.encode(response([_PHRASES[0], _PHRASES[1]])))
        assert (request.counters.pairs > 0) is shares


def test_random_sharing_is_seeded_in_range_and_of_the_given_ratio() -> None:
    rng = random.Random(5)
    words = Words()
    phrases = [" ".join(f"w{rng.randrange(500)}" for _ in range(rng.randrange(3, 30)))
               for _ in range(300)]  # fmt: skip
    token_ids = words.encode(response(phrases))

    def run(**knobs: Any) -> list[Proposal]:
        return make(words, start=7, block=4, random_ratio=0.25, **knobs).push(token_ids)

    proposals = run()
    assert [p.pairs for p in proposals] == [p.pairs for p in run()]
    assert [p.pairs for p in proposals] != [p.pairs for p in run(seed=1)]
    num_blocks = sum(len(p.step) // 4 for p in proposals)
    assert 0.22 < sum(len(p.pairs) for p in proposals) / num_blocks < 0.28
    starts: set[int] = set()
    for proposal in proposals:
        assert all(pair.src_start in starts for pair in proposal.pairs)
        blocks = set(range(proposal.step.start, proposal.step.end - 3, 4))
        assert {pair.dst_start for pair in proposal.pairs} <= blocks
        starts |= blocks
    # Sources come from all over the history, bounded where it is bounded.
    lags = [p.step.start - pair.src_start for p in proposals[200:] for pair in p.pairs]
    assert max(lags) > 2000
    recent = run(max_history_steps=2)
    assert max(p.step.start - pair.src_start for p in recent for pair in p.pairs) <= 62


def test_blank_tokens_between_steps_do_not_pile_up() -> None:
    words = Words()
    request = make(words, block=2)
    request.push(words.encode("\n\n " * 5000))
    request.push(words.encode("one two \n\n"))
    assert request.counters.steps == 1
    assert request.position == 5003


@pytest.mark.parametrize(("fixed_tau", "num_candidates"), [(0.8, 0), (0.79, 1)])
def test_a_candidate_is_strictly_above_the_threshold(fixed_tau: float, num_candidates: int) -> None:
    """Counts (1,1,2) and (1,2,2): cosine exactly 0.8."""
    words = Words()
    request = make(words, fixed_tau=fixed_tau, length_factor=False, use_structure=False)
    request.push(words.encode(response(["up up down", "up down down"])))
    assert request.counters.candidates == num_candidates
