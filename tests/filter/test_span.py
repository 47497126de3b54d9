# SPDX-License-Identifier: Apache-2.0
"""Only reasoning enters the filter, when the model marks it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.segment import ReasoningMarkers, ReasoningSpan
from tests.filter.words import Words

_START, _END = frozenset({1}), frozenset({2})
_PHRASE = "we look at that again because it was not clear at all before , wait ."


@pytest.mark.parametrize(
    ("inside", "tokens", "expected"),
    [
        (True, [5, 2, 6], [True, False, False]),
        (False, [5, 1, 6, 2, 7], [False, False, True, False, False]),
        # Forced reasoning whose model writes the marker nevertheless.
        (True, [1, 5, 2], [False, True, False]),
        # A second end changes nothing.
        (True, [2, 2, 5], [False, False, False]),
        (False, [2, 1, 5, 2, 1, 5], [False, False, True, False, False, True]),
        # A token that is both closes.
        (True, [3, 5], [False, False]),
    ],
)
def test_reasoning(inside: bool, tokens: list[int], expected: list[bool]) -> None:
    span = ReasoningSpan(_START | {3}, _END | {3}, inside)
    assert [span.push(token) for token in tokens] == expected


@pytest.mark.parametrize(
    ("prompt", "force", "expected"),
    [
        ([], False, False), ([], True, True), ([7, 8], True, True), ([7, 1], False, True),
        ([7, 1, 2, 9], True, False), ([1, 2, 9, 1, 9], False, True),
    ],
)  # fmt: skip
def test_the_last_marker_of_the_prompt_decides(
    prompt: list[int], force: bool, expected: bool
) -> None:
    assert ReasoningMarkers(_START, _END, force).inside_after(prompt) is expected


def _request(inside: bool, start: int = 100, block: int = 16) -> RequestFilter:
    words = Words()
    opens, closes = (frozenset(words.encode(marker)) for marker in ("<think>", "</think>"))
    span, config = ReasoningSpan(opens, closes, inside), FilterConfig(block=block)
    return RequestFilter(config, words.classes, words.vocabulary, start, span)


def _spans(text: str, inside: bool, chunk: int = 1000) -> list[tuple[int, int, str]]:
    words, request = Words(), _request(inside)
    token_ids = words.encode(text)
    found = []
    for at in range(0, len(token_ids), chunk):
        for proposal in request.push(token_ids[at : at + chunk]):
            step = proposal.step
            found.append((step.start, step.end, words.decode(list(step.token_ids))))
    assert request.position == 100 + len(token_ids)
    return found


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        # The end marker finishes the open step.
        (True, "a b \n\n c d </think> the value \n\n is 5 \n\n",
         [(100, 103, "a b \n\n"), (103, 105, "c d")]),
        # Nothing outside is a step, and positions go on.
        (False, "a \n\n <think> \n\n b \n\n c </think> d \n\n <think> e </think>",
         [(104, 106, "b \n\n"), (106, 107, "c"), (111, 112, "e")]),
        # A marker after a finished step finishes nothing.
        (True, "a \n\n </think> b", [(100, 102, "a \n\n")]),
        # A second start marker begins anew.
        (True, "a b <think> c </think>", [(100, 102, "a b"), (103, 104, "c")]),
    ],
)  # fmt: skip
def test_steps(inside: bool, text: str, expected: list[tuple[int, int, str]]) -> None:
    assert _spans(text, inside) == expected


def test_the_step_before_the_marker_can_be_a_source_and_share() -> None:
    request = _request(True, 0, block=4)
    text = f"{_PHRASE} </think> {_PHRASE} \n\n <think> {_PHRASE} </think>"
    first, second = request.push(Words().encode(text))
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
