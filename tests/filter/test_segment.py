# SPDX-License-Identifier: Apache-2.0
"""Tests how a token stream is split into steps (texts between blank lines), and how token bytes are found."""

import functools
import logging
import re
from itertools import pairwise
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import (
    BLANK,
    CLOSES,
    ENDS,
    OPENS,
    STARTS,
    ReasoningMarkers,
    ReasoningSpan,
    Segmenter,
    TokenClasses,
    classify,
)
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of
from tests.filter.made_tokenizers import NAMES, TEXT, made, read
from tests.filter.words import Words

_WHITE = " \t\r\n"


def classes_of(pieces: list[str]) -> TokenClasses:
    return TokenClasses(Vocabulary([piece.encode() for piece in pieces]))


def spans_of(pieces: list[str], max_step_tokens: int = 1000) -> list[tuple[int, int]]:
    segmenter = Segmenter(classes_of(pieces), max_step_tokens)
    found = [segmenter.push(i, i) for i in range(len(pieces))]
    return [span for span in found if span is not None]


def split_text(text: str) -> list[str]:
    """Slow reference: all steps of a text, including an unfinished last step."""
    parts = re.split(r"\n[ \t\r]*\n[ \t\r\n]*", text)
    return [part.strip(_WHITE) for part in parts if part.strip(_WHITE)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("word", 0), ("", BLANK), (" ", BLANK), ("\n", BLANK | STARTS | ENDS),
        ("\n\n", BLANK | STARTS | ENDS | OPENS), ("\r\n\t\r\n", BLANK | STARTS | ENDS | OPENS),
        (".\n", ENDS), (".\n  ", ENDS), (".\n\n", ENDS | CLOSES), (".\n \t\n ", ENDS | CLOSES),
        ("\nword", STARTS), (" \n\nword", STARTS | OPENS), ("a\nb", 0), ("a\n\nb", CLOSES),
        ("\u2028\u2028", 0),
    ],
)  # fmt: skip
def test_token_class(text: str, expected: int) -> None:
    assert classify(text.encode()) == expected


def test_part_of_a_character_is_visible_and_no_token_blank() -> None:
    classes = TokenClasses(Vocabulary([bytes([byte]) for byte in "数".encode()]))
    assert [*map(classes, (0, 1, 2, -1, 3, 1 << 40))] == [0] * 3 + [BLANK] * 3


def test_long_steps_are_cut() -> None:
    pieces = ["a"] * 7 + ["\n\n"] + ["b"] * 2 + ["\n\n"]
    assert spans_of(pieces, max_step_tokens=3) == [(0, 3), (3, 6), (6, 8), (8, 11)]
    # A blank line right after a cut does not start a step.
    assert spans_of(["a", "b", "\n", "\n", "c", "\n\n"], max_step_tokens=2) == [(0, 2), (4, 6)]
    # A token that completes a blank line and then has text starts the next step.
    assert spans_of(["one", "\n", "\ntwo\n", "\n", "\n", " "]) == [(0, 2), (2, 4)]


def test_an_open_step_can_be_closed() -> None:
    segmenter = Segmenter(classes_of(["a", "\n", "\n\n"]), 10)
    assert segmenter.close(0) is None
    assert [segmenter.push(token, 5 + token) for token in (0, 1)] == [None, None]
    assert (segmenter.close(7), segmenter.close(7)) == ((5, 7), None)


_MADE_UP = st.sampled_from(
    ["a", " b", "c ", ".", ".\n", "\n", "\n\n", " ", "\t\n", "?\n\n", " \n \n", "\r\n", "d\n ",
     "", "\n\ne", "\nf", "é", "\n \ng\n", "h.\r\n\r\n", " \n\n\n"]
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(_MADE_UP, max_size=60))
def test_same_steps_as_splitting_the_text(pieces: list[str]) -> None:
    spans = spans_of(pieces)
    steps = ["".join(pieces[start:end]) for start, end in spans]
    # With the appended period, the last step is always an unfinished one, which is dropped.
    assert [step.strip(_WHITE) for step in steps] == split_text(f"{''.join(pieces)}.")[:-1]
    # No step begins with a blank token, and only blank tokens lie between two steps.
    assert all(pieces[start].strip(_WHITE) for start, _ in spans)
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start
        assert not "".join(pieces[end:start]).strip()


# -- with tokenizers of every kind --
#
# If a token has text on both sides of a blank line, or between a newline and a blank line, the whole token is
# part of the open step (or begins one), and the next step starts after the token. So text is split as if the
# white space inside the token were removed and a blank line followed the token.

_STRADDLES = re.compile(
    rb"[^ \t\r\n][ \t\r]*\n[ \t\r]*\n[ \t\r\n]*[^ \t\r\n]"  # text on both sides of a blank line
    rb"|\A[ \t\r]*\n(?s:.*)[^ \t\r\n][ \t\r]*\n[ \t\r]*\n"  # text between a newline and a blank line
)


@functools.cache
def _classes(name: str) -> TokenClasses:
    return TokenClasses(read(name))


_PIECES = st.sampled_from(
    ["\n", "\n\n", " ", "\t", "\r\n", "a", " so", ".", ")", "//", "数学", "😀", "e\u0301", "\u2028",
     "\u00a0", "\x0b", "Wait", ",\n", "```", "<think>", "</think>", "7", "\\[", "\n \n", "é\n\n"]
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=60)
@given(st.one_of(st.lists(_PIECES, max_size=40).map("".join), st.text(max_size=60)))
def test_any_text(name: str, text: str) -> None:
    tokenizer = made(name)
    vocabulary = read(name)
    segmenter = Segmenter(_classes(name), 1 << 40)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = vocabulary.text(token_ids)
    assert decoded.lstrip(" ") == tokenizer.decode(token_ids).lstrip(" ")
    spans = [segmenter.push(token, i) for i, token in enumerate(token_ids)]
    spans.append(segmenter.close(len(token_ids)))
    steps = [vocabulary.text(token_ids[s[0] : s[1]]).strip(_WHITE) for s in spans if s is not None]
    across = {token for token in token_ids if _STRADDLES.search(vocabulary.pieces[token])}
    if not across:
        assert steps == split_text(decoded)
        return
    # Removes the white space inside each token of ``across``, and puts a blank line after the token.
    pieces = [*vocabulary.pieces]
    for token in across:
        pieces[token] = pieces[token].translate(None, _WHITE.encode()) + b"\n\n"
    shifted = b"".join(pieces[token] for token in token_ids).decode(errors="replace")
    assert ["".join(x.split()) for x in steps] == ["".join(x.split()) for x in split_text(shifted)]


_START = frozenset({1})
_END = frozenset({2})


def test_a_marker_is_no_reasoning_and_one_that_is_both_closes() -> None:
    span = ReasoningSpan(_START | {3}, _END | {3}, True)
    # Inside reasoning the model writes another start marker, 1, and later two end markers, 2. Token 3 is both.
    found = [span.push(token) for token in (5, 1, 5, 2, 2, 5, 1, 5, 3, 5)]
    assert found == [True, False, True, False, False, False, False, True, False, False]


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


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b c", "\n\n", "<think>", "</think>", "."]), max_size=40),
    st.booleans(),
    st.integers(1, 7),
)
def test_same_steps_as_splitting_the_text_at_markers(
    pieces: list[str], inside: bool, chunk: int
) -> None:
    """Chunks may have any size. The slow reference cuts the text at markers and keeps the reasoning."""
    expected = []
    parts = [""]
    where = [inside]
    for piece in pieces:
        if piece in ("<think>", "</think>"):
            parts.append("")
            where.append(piece == "<think>")
        else:
            parts[-1] += f" {piece}"
    for part, is_inside in zip(parts, where, strict=True):
        steps = [step.strip() for step in part.split("\n\n")]
        expected += [step for step in steps if step and is_inside]
    # An end marker is added, because otherwise the last step would still be open.
    words = Words()
    token_ids = words.encode(" ".join([*pieces, "</think>"]))
    opens, closes = (frozenset(words.encode(marker)) for marker in ("<think>", "</think>"))
    span = ReasoningSpan(opens, closes, inside)
    request = RequestFilter(FilterConfig(), words.classes, words.vocabulary, 100, span)
    chunks = (token_ids[at : at + chunk] for at in range(0, len(token_ids), chunk))
    found = [proposal.step for part in chunks for proposal in request.push(part)]
    assert request.position == 100 + len(token_ids)
    assert [words.decode(list(step.token_ids)).strip() for step in found] == expected
    for step in found:
        assert [*step.token_ids] == token_ids[step.start - 100 : step.end - 100]


_BYTE_EXACT = ["gpt2", "o200k", "no_split", "llama2"]


@given(st.lists(st.binary(max_size=5), max_size=30), st.lists(st.integers(-3, 40), max_size=40))
def test_text_is_the_concatenation(pieces: list[bytes], token_ids: list[int]) -> None:
    vocabulary = Vocabulary(pieces)
    assert vocabulary.pieces == tuple(pieces)
    expected = b"".join(pieces[i] for i in token_ids if 0 <= i < len(pieces))
    assert vocabulary.text([*token_ids, 1 << 40]) == expected.decode(errors="replace")


@pytest.mark.parametrize("name", NAMES)
def test_same_text_as_the_tokenizer(name: str) -> None:
    """``Vocabulary.text`` restores encoded text and also markers, perhaps with a space before a marker."""
    tokenizer = made(name)
    vocabulary = read(name)
    assert len(vocabulary.pieces) == len(tokenizer)
    # Not for llama2, which adds a space after a special token, nor embedded, which lacks most words of TEXT.
    if name in _BYTE_EXACT and name != "llama2":
        assert vocabulary.text(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT
    for marker in ("<think>", "</think>"):
        assert vocabulary.text([tokenizer.convert_tokens_to_ids(marker)]).strip() == marker


@pytest.mark.parametrize("name", _BYTE_EXACT)
def test_any_bytes_can_be_spelled(name: str) -> None:
    """Each byte that UTF-8 uses is a token, although ``decode`` of a single token loses parts of characters."""
    single = set(read(name).pieces)
    valid = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]
    assert all(bytes([byte]) in single for byte in valid)


class _Custom:
    """A tokenizer with custom code around tiktoken, as some models have."""

    eos_token_id = 262

    def __init__(self, key_type: type) -> None:
        ranks = {bytes([byte]): byte for byte in range(256)}
        ranks |= {
            piece: 256 + i for i, piece in enumerate((b"\n\n", b".\n", b".\n\n", b"th", b" x"))
        }
        specials: dict[Any, int] = {"<eos>": 262, "</think>": 263}
        pieces: dict[str, Any] = dict(mergeable_ranks=ranks, special_tokens=specials)
        self.tokenizer = tiktoken.Encoding("made", pat_str=r"\S+\n*|\s+", **pieces)
        keys = (piece if key_type is bytes else piece.decode("latin-1") for piece in ranks)
        vocabulary = {**specials, **dict(zip(keys, ranks.values(), strict=True))}
        self.get_vocab = lambda: vocabulary
        self.encode = lambda text, **_: self.tokenizer.encode(text, allowed_special="all")

    def decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode([i for i in token_ids if i != 261])

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [self.decode([i]) for i in token_ids]


def test_tiktoken_tokenizers_are_read(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens are read as bytes. Tokens stored as Latin-1, which XGrammar misreads, are decoded instead."""
    tokenizer = _Custom(bytes)
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.text(tokenizer.encode(TEXT)) == TEXT
    found = [vocabulary.pieces[i] for i in (258, 0xE6, 261, 262, 263)]
    assert found == [b".\n\n", b"\xe6", b"", b"<eos>", b"</think>"]
    with caplog.at_level(logging.INFO, "sglang_reasoncache"):
        vocabulary = vocabulary_of(_Custom(str))
    assert vocabulary.text(_Custom(str).encode("th x. (y)\n\nz")) == "th x. (y)\n\nz"
    # Decoding loses characters that span several tokens; the log says so.
    assert "sequences differ" in caplog.text
    with pytest.raises(ValueError, match="cannot read the tokens of int"):
        vocabulary_of(5)
