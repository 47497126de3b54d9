# SPDX-License-Identifier: Apache-2.0
"""Segmentation of a token stream equals splitting the decoded text at blank lines."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.segment import Segmenter, TokenClass, TokenClasses, classify
from sglang_reasoncache.filter.vocabulary import Vocabulary
from tests.filter.words import Words

_B, _S, _E = TokenClass.BLANK, TokenClass.STARTS_NEWLINE, TokenClass.ENDS_NEWLINE
_O, _C = TokenClass.OPENS_WITH_BLANK_LINE, TokenClass.CLOSES_WITH_BLANK_LINE


def classes_of(pieces: list[str]) -> TokenClasses:
    return TokenClasses(Vocabulary([piece.encode() for piece in pieces]))


def spans_of(
    pieces: list[str], max_step_tokens: int = 1000, start: int = 0
) -> list[tuple[int, int]]:
    """Spans for a stream of token texts, each its own token id."""
    segmenter = Segmenter(classes_of(pieces), max_step_tokens)
    found = [segmenter.push(i, start + i) for i in range(len(pieces))]
    return [span for span in found if span is not None]


def split_text(text: str) -> list[str]:
    """Slow reference: finished steps of the decoded text, without outer white space."""
    parts = re.split(r"\n[ \t\r]*\n[ \t\r\n]*", text)
    return [part.strip(" \t\r\n") for part in parts[:-1] if part.strip(" \t\r\n")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("word", TokenClass(0)),
        ("", _B),
        (" ", _B),
        ("\n", _B | _S | _E),
        ("\n\n", _B | _S | _E | _O),
        ("\r\n\t\r\n", _B | _S | _E | _O),
        (".\n", _E),
        (".\n  ", _E),
        (".\n\n", _E | _C),
        (".\n \t\n ", _E | _C),
        ("\nword", _S),
        (" \n\nword", _S | _O),
        ("a\nb", TokenClass(0)),
        ("a\n\nb", _C),
        ("\u2028\u2028", TokenClass(0)),
    ],
)
def test_token_class(text: str, expected: TokenClass) -> None:
    assert classify(text.encode()) == expected


def test_part_of_a_character_is_visible() -> None:
    classes = TokenClasses(Vocabulary([bytes([byte]) for byte in "数".encode()]))
    assert [classes(i) for i in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("token_id", [-1, 2, 1 << 40])
def test_an_id_outside_the_vocabulary_is_blank(token_id: int) -> None:
    classes = classes_of(["a", "b"])
    assert classes(token_id) == TokenClass.BLANK
    assert classes.is_blank(token_id)
    assert not classes.is_blank(0)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["one", " two", ".\n\n", "three"], [(0, 3)]),
        (["one", "\n\n", "two", "\n\n"], [(0, 2), (2, 4)]),
        (["one", ".\n", "\n", "two"], [(0, 3)]),
        (["one", ".\n", "two", "\n", "\n"], [(0, 5)]),
        (["one", "\n", " ", "\t", "\n", "two"], [(0, 5)]),
        # Further blank tokens belong to no step and open none.
        (["one", "\n\n", "\n", "\n\n", " ", "two", "\n\n"], [(0, 2), (5, 7)]),
        (["\n\n", "one", "\n\n"], [(1, 3)]),
        # A step of one token that carries its own delimiter.
        (["one", "\n\n", "?\n\n", "two"], [(0, 2), (2, 3)]),
        # Blank line completed by a token with text: it starts the next step.
        (["one", "\n\ntwo", "\n\n"], [(0, 1), (1, 3)]),
        (["one", "\n", "\ntwo", "\n\n"], [(0, 2), (2, 4)]),
        (["one", "\n", "\ntwo\n", "\n"], [(0, 2), (2, 4)]),
        (["one", "\n", "", "\n"], [(0, 4)]),
        (["one", "\n", "two", "\n", "three"], []),
    ],
)
def test_spans(pieces: list[str], expected: list[tuple[int, int]]) -> None:
    assert spans_of(pieces) == expected


def test_long_step_is_cut() -> None:
    pieces = ["a"] * 7 + ["\n\n"] + ["b"] * 2 + ["\n\n"]
    assert spans_of(pieces, max_step_tokens=3) == [(0, 3), (3, 6), (6, 8), (8, 11)]


def test_delimiter_right_after_a_cut_opens_no_step() -> None:
    assert spans_of(["a", "b", "\n", "\n", "c", "\n\n"], max_step_tokens=2) == [(0, 2), (4, 6)]


def test_an_open_step_can_be_closed() -> None:
    segmenter = Segmenter(classes_of(["a", "\n", "\n\n"]), 10)
    assert segmenter.close(0) is None
    assert [segmenter.push(token, 5 + token) for token in (0, 1)] == [None, None]
    assert segmenter.close(7) == (5, 7)
    assert segmenter.close(7) is None
    # The newline before it is forgotten.
    assert [segmenter.push(token, 7 + i) for i, token in enumerate((0, 1))] == [None, None]
    assert segmenter.start == 7


def test_positions_start_anywhere() -> None:
    assert spans_of(["a", "\n\n", "b", "\n\n"], start=37) == [(37, 39), (39, 41)]


_PIECES = st.sampled_from(
    ["a", " b", "c ", ".", ".\n", "\n", "\n\n", " ", "\t\n", "?\n\n", " \n \n", "\r\n", "d\n ",
     "", "\n\ne", "\nf", "é", "\n \ng\n", "h.\r\n\r\n", " \n\n\n"]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(_PIECES, max_size=60))
def test_same_steps_as_splitting_the_text(pieces: list[str]) -> None:
    spans = spans_of(pieces)
    steps = ["".join(pieces[start:end]) for start, end in spans]
    assert [step.strip(" \t\r\n") for step in steps] == split_text("".join(pieces))
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start
        assert not "".join(pieces[end:start]).strip()


def test_word_level() -> None:
    words = Words()
    ids = words.encode("so c 7 , \n\n now next . \n\n \n\n end")
    segmenter = Segmenter(words.classes, 1000)
    spans = [segmenter.push(token, i) for i, token in enumerate(ids)]
    assert [span for span in spans if span] == [(0, 5), (5, 9)]
