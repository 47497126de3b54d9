# SPDX-License-Identifier: Apache-2.0
"""Only reasoning enters the filter, when the model marks it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.span import (
    Place,
    ReasoningMarkers,
    ReasoningSpan,
)
from tests.filter.words import Words

_IN, _OUT, _OPENED, _CLOSED = Place.INSIDE, Place.OUTSIDE, Place.OPENED, Place.CLOSED
_START, _END = frozenset({1}), frozenset({2})
_PHRASE = "we look at that again because it was not clear at all before , wait ."


@pytest.mark.parametrize(
    ("inside", "tokens", "expected"),
    [
        (True, [5, 2, 6], [_IN, _CLOSED, _OUT]),
        (False, [5, 1, 6, 2, 7], [_OUT, _OPENED, _IN, _CLOSED, _OUT]),
        # Forced reasoning whose model writes the marker nevertheless.
        (True, [1, 5, 2], [_OPENED, _IN, _CLOSED]),
        # A second end changes nothing.
        (True, [2, 2, 5], [_CLOSED, _OUT, _OUT]),
        (False, [2, 1, 5, 2, 1, 5], [_OUT, _OPENED, _IN, _CLOSED, _OPENED, _IN]),
    ],
)
def test_places(inside: bool, tokens: list[int], expected: list[Place]) -> None:
    span = ReasoningSpan(_START, _END, inside)
    assert [span.push(token) for token in tokens] == expected


def test_a_token_that_is_both_closes() -> None:
    span = ReasoningSpan(_START, _START, True)
    assert [span.push(1), span.push(1)] == [_CLOSED, _OUT]


@pytest.mark.parametrize(
    ("prompt", "force", "expected"),
    [
        ([], False, False),
        ([], True, True),
        ([7, 8], True, True),
        ([7, 1], False, True),
        ([7, 1, 2, 9], True, False),
        ([1, 2, 9, 1, 9], False, True),
    ],
)
def test_the_last_marker_of_the_prompt_decides(
    prompt: list[int], force: bool, expected: bool
) -> None:
    assert ReasoningMarkers(_START, _END, force).inside_after(prompt) is expected


def _spans(text: str, inside: bool, chunk: int = 1000) -> list[tuple[int, int, str]]:
    words = Words()
    (start,), (end,) = words.encode("<think>"), words.encode("</think>")
    span = ReasoningSpan(frozenset({start}), frozenset({end}), inside)
    request = RequestFilter(FilterConfig(), words.classes, words.vocabulary, 100, span)
    token_ids = words.encode(text)
    found = []
    for at in range(0, len(token_ids), chunk):
        for proposal in request.push(token_ids[at : at + chunk]):
            step = proposal.step
            found.append((step.start, step.end, words.decode(list(step.token_ids))))
    assert request.position == 100 + len(token_ids)
    return found


def test_the_end_marker_finishes_the_open_step() -> None:
    assert _spans("a b \n\n c d </think> the value \n\n is 5 \n\n", inside=True) == [
        (100, 103, "a b \n\n"),
        (103, 105, "c d"),
    ]


def test_nothing_outside_is_a_step_and_positions_go_on() -> None:
    text = "a \n\n <think> \n\n b \n\n c </think> d \n\n <think> e </think>"
    assert _spans(text, inside=False) == [
        (104, 106, "b \n\n"),
        (106, 107, "c"),
        (111, 112, "e"),
    ]


def test_a_marker_after_a_finished_step_finishes_nothing() -> None:
    assert _spans("a \n\n </think> b", inside=True) == [(100, 102, "a \n\n")]


def test_the_step_before_the_marker_can_be_a_source_and_share() -> None:
    words = Words()
    (start,), (end,) = words.encode("<think>"), words.encode("</think>")
    span = ReasoningSpan(frozenset({start}), frozenset({end}), True)
    request = RequestFilter(FilterConfig(block=4), words.classes, words.vocabulary, 0, span)
    text = f"{_PHRASE} </think> {_PHRASE} \n\n <think> {_PHRASE} </think>"
    first, second = request.push(words.encode(text))
    assert first.pairs == ()
    assert [pair.src_start for pair in second.pairs] == [0, 4, 8, 12]
    assert request.counters.steps == 2


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b c", "\n\n", "<think>", "</think>", "."]), max_size=40),
    st.booleans(),
    st.integers(1, 7),
)
def test_same_steps_as_splitting_the_text(pieces: list[str], inside: bool, chunk: int) -> None:
    """However the tokens arrive. Slow reference: cut at markers, keep what is inside."""
    expected, parts, where = [], [""], [inside]
    for piece in pieces:
        if piece in ("<think>", "</think>"):
            parts.append("")
            where.append(piece == "<think>")
        else:
            parts[-1] += f" {piece}"
    for part, is_inside in zip(parts, where, strict=True):
        steps = [step.strip() for step in part.split("\n\n")]
        expected += [step for step in steps if step and is_inside]
    # Without a marker at its end the last step is still open.
    text = " ".join([*pieces, "</think>"])
    assert [step.strip() for _, _, step in _spans(text, inside, chunk)] == expected
