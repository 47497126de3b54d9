# SPDX-License-Identifier: Apache-2.0
"""Tests the default filter (``match=runs``): which equal blocks share, whose slots they use, and when."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reasoncache.filter import runs
from sglang_reasoncache.filter.aging import AgeRule
from sglang_reasoncache.filter.matcher import AcrossPair, BlockPair
from sglang_reasoncache.filter.runs import RunGroup, RunMatcher
from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import FilterConfig
from tests.filter.work import count_calls

STEPS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=6)


def propose(config: FilterConfig, steps: list[list[int]], start: int = 0) -> list[BlockPair]:
    matcher = RunMatcher(config, start)
    found = []
    for tokens in steps:
        found += matcher.propose(Step.build(start, tokens, ""))
        start += len(tokens)
    return found


SHAPES = [(1, 0), (3, 0), (2, 3), (4, 2)]


@given(STEPS, st.sampled_from(SHAPES), st.integers(0, 9), st.booleans())
def test_runs_are_those_of_brute_force(
    steps: list[list[int]], shape: tuple[int, int], start: int, newest: bool
) -> None:
    block, lead = shape
    direction: Any = "newest" if newest else "oldest"
    shapes: dict[str, Any] = dict(block=block, min_run=lead + block)
    config = FilterConfig(match="runs", direction=direction, **shapes)
    tokens = [token for step in steps for token in step]
    found = propose(config, steps, start)

    def run(at: int) -> list[int]:
        return tokens[at - lead - start : at - start + block]

    # Direction oldest, left to right: a block is paired if its run (``lead`` tokens and the block) came before.
    first = start + lead
    at = first
    expected = []
    while at + block <= start + len(tokens):
        if any(run(earlier) == run(at) for earlier in range(first, at - block + 1)):
            expected.append(at)
            at += block
        else:
            at += 1
    if newest:
        # Earlier blocks of two pairs are the same block, or do not overlap.
        starts = sorted({earlier for _, earlier in found})
        assert all(b - a >= block for a, b in itertools.pairwise(starts))
    else:
        assert [pair.dst_start for pair in found] == expected
    for later, earlier in found:
        assert run(later) == run(earlier) and start + lead <= earlier <= later - block


@pytest.mark.parametrize(("direction", "source"), [("newest", 6), ("oldest", 0)])
def test_which_of_several_equal_runs(direction: Any, source: int) -> None:
    config = FilterConfig(match="runs", block=3, direction=direction)
    assert propose(config, [[1, 2, 3, 7, 8, 9, 1, 2, 3, 4, 1, 2, 3]])[-1] == (10, source)


def test_no_run_crosses_tokens_that_take_no_part() -> None:
    matcher = RunMatcher(FilterConfig(match="runs", block=4), 0)
    assert matcher.propose(Step.build(0, [1, 2, 3, 4], "")) == []
    assert matcher.propose(Step.build(4, [1, 2], "")) == []
    # Position 6 takes no part, because it belongs to no step.
    assert matcher.propose(Step.build(7, [3, 4, 5, 1, 2, 3, 4], "")) == [(10, 0)]


def test_a_loop_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_MAX_RUNS", 1000)
    config = FilterConfig(match="runs", block=8)
    matcher = RunMatcher(config, 0)
    for start in range(0, 60_000, 1000):
        step = Step.build(start, [start % 3000] * 1000, "")
        # Some calls a token, however long the loop has been going on; about 5,200 are made.
        assert count_calls(lambda step=step: matcher.propose(step)) < 8000  # type: ignore[misc]
    assert len(matcher._runs) <= 1000


AGE = 4
CONFIG = FilterConfig(match="runs", block=3, min_run=3, min_age=AGE, direction="newest")


def grouped(
    responses: list[list[int]], start: int, block: int = 3
) -> tuple[list[RunMatcher], list[list[AcrossPair]], RunGroup]:
    """Feeds a group's responses in turn, six tokens at a time. Returns members, their pairs and the group."""
    config = dataclasses.replace(CONFIG, block=block, min_run=block)
    group = RunGroup()
    members = [RunMatcher(config, start) for _ in responses]
    found: list[list[AcrossPair]] = [[] for _ in responses]
    for number, member in enumerate(members):
        member.join(number, group)
    for at in range(0, max(map(len, responses)), 6):
        for number, (member, tokens) in enumerate(zip(members, responses, strict=True)):
            if tokens[at : at + 6]:
                member.propose(Step.build(start + at, tokens[at : at + 6], ""))
                found[number] += member.across()
    return members, found, group


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=4),
    st.sampled_from([3, 4]),
    st.integers(0, 9),
)
def test_members_read_equal_old_blocks_and_pass_nothing_on(
    responses: list[list[int]], block: int, start: int
) -> None:
    _, found, _ = grouped(responses, start, block)
    reads: set[tuple[int, int]] = set()
    is_read: set[tuple[int, int]] = set()
    for reader, pairs in enumerate(found):
        tokens = responses[reader]
        for dst, src, source in pairs:
            here = dst - start
            there = src - start
            assert tokens[here : here + block] == responses[source][there : there + block]
            assert min(here, there) >= 0
            # At least AGE tokens follow each of the two blocks, whichever was written first.
            assert here + block <= len(tokens) - AGE
            assert there + block <= len(responses[source]) - AGE
            assert source != reader or abs(here - there) >= block
            reads |= {(reader, here + i) for i in range(block)}
            is_read |= {(source, there + i) for i in range(block)}
    assert reads.isdisjoint(is_read)
    assert len(reads) == block * sum(map(len, found)), "a token reads once"
    assert len(responses) > 1 or not reads


def test_a_member_that_left_is_no_source() -> None:
    text = list(range(10, 22))
    members, found, group = grouped([text, [1, 2, 3]], 0)
    assert group.copies and found == [[], []]
    late = RunMatcher(CONFIG, 0)
    late.join(7, group)
    members[0].join(0, None)
    late.propose(Step.build(0, text, ""))
    assert late.across() == []
    members[0].join(0, group)
    late = RunMatcher(CONFIG, 0)
    late.join(8, group)
    late.propose(Step.build(0, text, ""))
    # While member 0 was away, member 7's blocks took its place in ``group.copies``, so member 8 reads member 7.
    assert late.across() == [(0, 0, 7), (3, 3, 7)]


def test_tokens_that_take_no_part_are_equal_to_none() -> None:
    group = RunGroup()
    for number in range(3):
        member = RunMatcher(CONFIG, 0)
        member.join(number, group)
        assert member.propose(Step.build(6, list(range(40, 52)), "")) == []
        pairs = member.across()
    # Member 0 was alone when its tokens came, so ``group.copies`` has only member 1's blocks to read.
    assert pairs == [(6, 6, 1), (9, 9, 1)]


@given(STEPS, st.lists(st.integers(0, 2), max_size=40), st.sampled_from(SHAPES), st.integers(0, 9))
def test_old_blocks_read_equal_blocks_of_the_prompt(
    steps: list[list[int]], prompt: list[int], shape: tuple[int, int], age: int
) -> None:
    """Windows are equal, and no token reads twice, within the response or the prompt. A block that could read
    the prompt does so, unless one of its tokens reads already."""
    block, lead = shape
    shapes: dict[str, Any] = dict(block=block, min_run=lead + block, min_age=age)
    config = FilterConfig(match="runs", direction="newest", **shapes)
    start = len(prompt)
    matcher = RunMatcher(config, start, prompt)
    rule = AgeRule(config, start)
    whole = list(prompt)
    readers: list[int] = []
    for tokens in steps:
        step = Step.build(len(whole), tokens, "")
        whole += tokens
        readers += [pair.dst_start for pair in rule.release(matcher.propose(step), len(whole))]
        for reader, source in matcher.quoted():
            window = whole[reader - lead : reader + block]
            assert window == whole[source - lead : source + block]
            assert lead <= source <= start - block and start + lead <= reader
            assert reader + block <= len(whole) - age
            readers.append(reader)
    assert all(b - a >= block for a, b in itertools.pairwise(sorted(readers)))
    # What waits for its age may still be linked, so only responses without repeats are complete.
    windows = {tuple(prompt[at - lead : at + block]) for at in range(lead, start - block + 1)}
    if not readers and not age:
        for at in range(start + lead, len(whole) - block + 1):
            assert tuple(whole[at - lead : at + block]) not in windows


def test_a_quote_is_read_in_order() -> None:
    """If the prompt has a passage twice, the blocks of a quote read one of the two, to its end."""
    config = FilterConfig(match="runs", direction="newest", block=2, min_run=2)
    passage = [1, 2, 3, 4, 5, 6]
    prompt = [*passage, 9, *passage, 8, 3, 4]
    matcher = RunMatcher(config, len(prompt), prompt)
    matcher.propose(Step.build(len(prompt), passage, ""))
    pairs = matcher.quoted()
    assert [reader - len(prompt) for reader, _ in pairs] == [0, 2, 4]
    assert [source for _, source in pairs] == [7, 9, 11]
    # A matcher that is not told the prompt reads nothing of it.
    matcher = RunMatcher(config, len(prompt))
    matcher.propose(Step.build(len(prompt), passage, ""))
    assert matcher.quoted() == []
