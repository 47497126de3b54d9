# SPDX-License-Identifier: Apache-2.0
"""Steps found token by token are those of splitting the decoded text, whatever the tokenizer.

A token may hold text on both sides of a blank line, or between two of them (``;\\n\\n//``
in o200k-like vocabularies, words in one that merges across everything). Token boundaries
are all the filter has, so such a token goes as a whole to the step that was open before
it, and the next step starts behind it. Then the steps are those of splitting a text in
which the token's own blank lines are gone and one follows it; with no such token, exactly
those of the text.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.request_filter import FilterConfig, RequestFilter
from sglang_reasoncache.filter.segment import Segmenter, TokenClasses
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of
from tests.filter.made_tokenizers import MAKERS, TEXT, made, traces

_NAMES = [make.__name__ for make in MAKERS]
_WHITE = " \t\r\n"
_STRADDLES = re.compile(
    rb"[^ \t\r\n][ \t\r]*\n[ \t\r]*\n[ \t\r\n]*[^ \t\r\n]"  # text on both sides
    rb"|\A[ \t\r]*\n(?s:.*)[^ \t\r\n][ \t\r]*\n[ \t\r]*\n"  # text between two
)
_VOCABULARIES: dict[str, tuple[Vocabulary, TokenClasses]] = {}


def read(name: str) -> tuple[Any, Vocabulary, TokenClasses]:
    if name not in _VOCABULARIES:
        vocabulary = vocabulary_of(made(name))
        _VOCABULARIES[name] = vocabulary, TokenClasses(vocabulary)
    return made(name), *_VOCABULARIES[name]


def split_text(text: str) -> list[str]:
    """Slow reference: all steps of a text, the unfinished last one included."""
    parts = re.split(r"\n[ \t\r]*\n[ \t\r\n]*", text)
    return [part.strip(_WHITE) for part in parts if part.strip(_WHITE)]


def found_steps(vocabulary: Vocabulary, classes: TokenClasses, token_ids: list[int]) -> list[str]:
    """The segmenter's steps, as text."""
    segmenter = Segmenter(classes, 1 << 40)
    spans = [segmenter.push(token, i) for i, token in enumerate(token_ids)]
    spans.append(segmenter.close(len(token_ids)))
    return [vocabulary.text(token_ids[s[0] : s[1]]).strip(_WHITE) for s in spans if s is not None]


def straddling(vocabulary: Vocabulary, token_ids: list[int]) -> set[int]:
    """Ids of tokens across a blank line, or from one to the next."""
    return {i for i in set(token_ids) if _STRADDLES.search(vocabulary.bytes_of(i))}


def check(name: str, text: str) -> tuple[int, int]:
    """Assert the property for one response; number of steps and of straddling tokens."""
    tokenizer, vocabulary, classes = read(name)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoded = vocabulary.text(token_ids)
    assert decoded.lstrip(" ") == tokenizer.decode(token_ids).lstrip(" ")
    steps = found_steps(vocabulary, classes, token_ids)
    across = straddling(vocabulary, token_ids)
    if not across:
        assert steps == split_text(decoded)
        return len(steps), 0
    squeezed = [_WHITE_RUNS.sub("", step) for step in steps]
    assert squeezed == [
        _WHITE_RUNS.sub("", step) for step in split_text(_shifted(vocabulary, token_ids, across))
    ]
    return len(steps), sum(token in across for token in token_ids)


_WHITE_RUNS = re.compile(f"[{_WHITE}]+")


def _shifted(vocabulary: Vocabulary, token_ids: list[int], across: set[int]) -> str:
    """The text with one blank line behind each straddling token, none inside."""
    pieces = []
    for token in token_ids:
        piece = vocabulary.bytes_of(token)
        if token in across:
            piece = piece.translate(None, _WHITE.encode()) + b"\n\n"
        pieces.append(piece)
    return b"".join(pieces).decode(errors="replace")


@pytest.mark.parametrize("name", _NAMES)
def test_text_of_mathematics_code_and_unicode(name: str) -> None:
    num_steps, num_across = check(name, TEXT)
    # The word-level one knows no single newline, Unigram's metaspaces swallow some.
    assert num_steps >= (3 if name == "embedded" else 8)
    assert num_across == 0 or name in ("o200k", "no_split", "unigram")


_PIECES = st.sampled_from(
    ["\n", "\n\n", " ", "\t", "\r\n", "a", " so", ".", ")", "//", "数学", "😀", "e\u0301", "\u2028",
     "\u00a0", "\x0b", "Wait", ",\n", "```", "<think>", "</think>", "7", "\\[", "\n \n", "é\n\n"]
)  # fmt: skip


@pytest.mark.parametrize("name", _NAMES)
@settings(deadline=None, max_examples=60)
@given(st.one_of(st.lists(_PIECES, max_size=40).map("".join), st.text(max_size=60)))
def test_any_text(name: str, text: str) -> None:
    check(name, text)


@pytest.mark.parametrize("name", _NAMES)
def test_real_responses(name: str) -> None:
    """All of them; the embedded model's words are not theirs, so a few do there."""
    if not traces():
        pytest.skip("no *.jsonl in ../shared/data/traces beside the checkout or REASONCACHE_TRACES")
    responses = traces() if name in ("gpt2", "cl100k", "o200k", "llama2") else traces()[::4]
    counts = [check(name, response) for response in responses]
    num_steps = sum(steps for steps, _ in counts)
    num_across = sum(across for _, across in counts)
    print(f"{name}: {num_steps} steps, {num_across} straddling tokens")
    assert num_steps > 20 * len(responses) or name in ("no_split", "unigram")
    assert num_across == 0 or name in ("no_split", "unigram")


@pytest.mark.parametrize("name", ["cl100k", "llama2", "no_split"])
def test_the_filter_finds_the_same_steps_in_chunks(name: str) -> None:
    """Whatever number of tokens each forward brings."""
    tokenizer, vocabulary, classes = read(name)
    token_ids = tokenizer.encode(TEXT + "\n\n", add_special_tokens=False)
    expected = found_steps(vocabulary, classes, token_ids)
    for chunk in (1, 2, 7, len(token_ids)):
        request = RequestFilter(FilterConfig(use_structure=False), classes, vocabulary, 0)
        steps = [
            vocabulary.text(proposal.step.token_ids).strip(_WHITE)
            for at in range(0, len(token_ids), chunk)
            for proposal in request.push(token_ids[at : at + chunk])
        ]
        assert steps == expected


def test_a_straddling_token_goes_to_the_step_before_it() -> None:
    pieces = [b"a", b" b", b".\n\nc", b" d", b";\n\n//\n\n", b"e\n\nf", b"\n\ng", b"\n\n"]
    vocabulary = Vocabulary(pieces)
    token_ids = list(range(len(pieces)))
    assert straddling(vocabulary, token_ids) == {2, 4, 5}
    steps = found_steps(vocabulary, TokenClasses(vocabulary), token_ids)
    assert steps == ["a b.\n\nc", "d;\n\n//", "e\n\nf", "g"]
