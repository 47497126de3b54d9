# SPDX-License-Identifier: Apache-2.0
"""Tests the age rule: when a pair of equal blocks is released, which block reads which, and what this costs."""

import itertools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.aging import AgeRule
from sglang_reasoncache.filter.matcher import BlockPair
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.runs import RunGroup, RunMatcher
from sglang_reasoncache.filter.segment import Step, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary

# Token 0 is a blank line.
_VOCABULARY = Vocabulary([b"\n\n", *[b"x"] * 1000])
_CLASSES = TokenClasses(_VOCABULARY)


def aged(direction: Any, min_age: int, block: int = 4) -> AgeRule:
    return AgeRule(FilterConfig(direction=direction, min_age=min_age, block=block), 0)


def test_the_later_block_waits_until_it_is_old() -> None:
    rule = aged("oldest", 10)
    assert rule.release([(20, 0)], 24) == []
    assert rule.release([], 33) == []
    assert rule.release([(30, 0)], 34) == [(20, 0)]
    assert rule.release([], 44) == [(30, 0)]


def test_the_earlier_block_reads_the_newest_of_its_chain() -> None:
    rule = aged("newest", 10)
    # The block at position 0 is too new to read a copy. Newer copies come, each paired with an older one.
    assert rule.release([(8, 0)], 12) == []
    assert rule.release([(12, 8)], 13) == []
    assert rule.release([(18, 0)], 22) == [(0, 18), (8, 18)]
    assert rule.release([], 26) == [(12, 18)]
    # Blocks 0, 8 and 12 read block 18 and are redirected with it, so only the pair (18, 40) is released.
    assert rule.release([(40, 8)], 44) == [(18, 40)]


def test_a_block_that_overlaps_two_adjacent_readers_reads_a_part_of_each_source() -> None:
    rule = aged("newest", 0)
    assert rule.release([(20, 0), (24, 4)], 28) == [(0, 20), (4, 24)]
    # Block 2 consists of the ends of two readers, so its slots are those of block 22, which can read block 40.
    assert rule.release([(40, 2)], 44) == [(22, 40)]
    # Block 18 consists of tokens that read nothing, and two that read block 40. No token may read twice.
    assert rule.release([(50, 19)], 54) == []


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 50)), max_size=20),
    st.sampled_from(["newest", "oldest"]),
    st.integers(0, 30),
)
def test_no_reader_is_young_and_no_token_reads_twice(
    draws: list[tuple[int, int]], direction: str, min_age: int
) -> None:
    block = 4
    end = 0
    rule = aged(direction, min_age, block)
    tokens: set[int] = set()
    for gap, earlier in draws:
        later = end + gap
        end = later + block
        found = [(later, earlier)] if earlier <= later else []
        for reader, source in rule.release(found, end):
            assert reader + block <= end - min_age and source + block <= end
            assert (source - reader if direction == "newest" else reader - source) >= block
            assert tokens.isdisjoint(range(reader, reader + block))
            tokens.update(range(reader, reader + block))


class PlainRule:
    """The age rule of direction ``newest`` in a few lines. Follows each link of a chain, and keeps all."""

    def __init__(self, config: FilterConfig) -> None:
        self._config = config
        self._sources: dict[int, int] = {}
        self._waiting: set[int] = set()

    def release(self, found: Iterable[tuple[int, int]], end: int) -> list[BlockPair]:
        for later, earlier in found:
            reader = self._newest(earlier)
            self._sources[reader] = later
            self._waiting.add(reader)
        last = end - self._config.min_age - self._config.block
        ready = sorted(reader for reader in self._waiting if reader <= last)
        self._waiting.difference_update(ready)
        return [BlockPair(reader, self._newest(self._sources[reader])) for reader in ready]

    def _newest(self, start: int) -> int:
        while (later := self._next(start)) is not None:
            start = later
        return start

    def _next(self, start: int) -> int | None:
        if start in self._sources:
            return self._sources[start]
        for back in range(1, self._config.block):
            source = self._sources.get(start - back)
            behind = self._sources.get(start - back + self._config.block)
            if source is not None and behind == source + self._config.block:
                return source + back
        return None


class PlainMatcher(RunMatcher):
    """Follows each link of a chain."""

    def _last(self, start: int) -> int:
        while start in self._reads:
            start = self._reads[start]
        return start


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Random tokens, loops of any period with some tokens exchanged, and copies of earlier passages."""
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    text: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(["random", "loop", "copy"]))
        alphabet = draw(st.sampled_from([1, 2, 3, 50]))
        length = draw(st.integers(1, 100))
        if kind == "random":
            text += [rng.randrange(alphabet) for _ in range(length)]
        elif kind == "loop":
            flips = draw(st.sampled_from([0.0, 0.02, 0.1]))
            period = [rng.randrange(alphabet) for _ in range(draw(st.integers(1, 20)))]
            for token in itertools.islice(itertools.cycle(period), length):
                text.append(rng.randrange(alphabet) if rng.random() < flips else token)
        elif text:
            start = draw(st.integers(0, len(text) - 1))
            text += text[start : start + length]
    return text


@settings(deadline=None, max_examples=400)
@given(
    texts(),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from([0, 4]),
    st.sampled_from([0, 1, 3, 8, 20, 64, 256]),
    st.integers(0, 9),
    st.data(),
)
def test_runs_are_released_as_if_each_link_was_followed(
    text: list[int],
    block: int,
    context: int,
    min_age: int,
    start: int,
    data: st.DataObject,
) -> None:
    config = FilterConfig(
        match="runs",
        direction="newest",
        block=block,
        min_run=block + context,
        min_age=min_age,
    )
    matcher = RunMatcher(config, start)
    plain_matcher = PlainMatcher(config, start)
    rule = AgeRule(config, start)
    plain_rule = PlainRule(config)
    at = 0
    while at < len(text):
        # One token in 20 steps is left out: it belongs to no step, so no window contains it.
        at += data.draw(st.sampled_from([0] * 19 + [1]))
        tokens = text[at : at + data.draw(st.integers(1, 80))]
        if not tokens:
            break
        step = Step.build(start + at, tokens, "")
        at += len(tokens)
        found = matcher.propose(step)
        assert found == plain_matcher.propose(step)
        assert rule.release(found, step.end) == plain_rule.release(found, step.end)


@settings(deadline=None)
@given(texts(), st.sampled_from([1, 2, 5]), st.integers(0, 40))
def test_similar_steps_release_equal_blocks_and_read_the_newest(
    text: list[int], block: int, min_age: int
) -> None:
    """Blocks of similar steps may overlap in any way, unlike those of :class:`RunMatcher`."""
    config = FilterConfig(
        direction="newest", block=block, min_age=min_age, fixed_tau=0.2, use_structure=False
    )
    tokens: list[int] = []
    for at in range(0, len(text), 14):
        tokens += [*(token + 1 for token in text[at : at + 14]), 0]
    request = RequestFilter(config, _CLASSES, _VOCABULARY, 0)
    read: set[int] = set()
    for proposal in request.push(tokens):
        for reader, source in proposal.pairs:
            assert tokens[reader : reader + block] == tokens[source : source + block]
            assert reader + block <= min(source, proposal.step.end - min_age)
            assert source + block <= proposal.step.end
            assert read.isdisjoint(range(reader, reader + block))
            read.update(range(reader, reader + block))


#: Tokens of a hostile response.
_LENGTH = 8192


def loop(period: int, flips: float = 0.0) -> list[int]:
    rng = random.Random(period)
    text = [1 + at % period for at in range(_LENGTH)]
    return [1 + rng.randrange(period) if rng.random() < flips else token for token in text]


def two_tokens() -> list[int]:
    rng = random.Random(0)
    return [1 + rng.randrange(2) for _ in range(_LENGTH)]


def short_repeats_twice() -> list[int]:
    """A passage of 12 tokens, again and again, after a different token each time. Then all of it once more,
    so that the filter looks up all blocks of one chain, the first block first."""
    half = list(range(50, 80))
    for separator in range(_LENGTH // 26):
        half += [100 + separator, *range(1, 13)]
    return half + half


@pytest.mark.parametrize(("min_age", "members"), [(0, 1), (256, 1), (4096, 1), (256, 2)])
@pytest.mark.parametrize(
    "text",
    [
        *(pytest.param(loop(period), id=f"period {period}") for period in (1, 8, 9, 13, 100)),
        pytest.param(loop(9, 0.01), id="period 9, some tokens exchanged"),
        pytest.param(two_tokens(), id="two tokens"),
        pytest.param(short_repeats_twice(), id="short repeats"),
    ],
)
def test_a_token_costs_few_operations_whatever_the_text(
    text: list[int], min_age: int, members: int
) -> None:
    """Counts the lines of code that run, because time depends on the machine."""
    config = FilterConfig(match="runs", direction="newest", block=8, min_run=12, min_age=min_age)
    group = RunGroup()
    requests = [RequestFilter(config, _CLASSES, _VOCABULARY, 0) for _ in range(members)]
    released = 0

    def push() -> None:
        nonlocal released
        for number, request in enumerate(requests):
            request.join(number, group)
        for at in range(0, len(text), 1024):
            for request in requests:
                for proposal in request.push(text[at : at + 1024]):
                    released += len(proposal.pairs)

    lines = lines_run(push)
    assert released > 100
    assert lines < 64 * members * len(text)


def lines_run(work: Callable[[], object]) -> int:
    """The number of lines of Python code that ``work`` runs."""
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines
