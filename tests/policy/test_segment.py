# SPDX-License-Identifier: Apache-2.0
"""Segmentation of a token stream equals splitting the decoded text at blank lines."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from sglang_reasoncache.policy.segment import Segmenter, TokenClass, TokenClasses, classify
from tests.policy.words import Words

_B, _S, _E = TokenClass.BLANK, TokenClass.STARTS_NEWLINE, TokenClass.ENDS_NEWLINE
_O, _C = TokenClass.OPENS_WITH_BLANK_LINE, TokenClass.CLOSES_WITH_BLANK_LINE


def spans_of(
    pieces: list[str], max_step_tokens: int = 1000, start: int = 0
) -> list[tuple[int, int]]:
    """Spans for a stream of token texts, each its own token id."""
    segmenter = Segmenter(TokenClasses(lambda i: pieces[i]), max_step_tokens)
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
    assert classify(text) == expected


def test_long_token_is_classified_by_its_ends() -> None:
    assert classify("x" * 100_000 + ".\n\n") == _E | _C


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


def test_positions_start_anywhere() -> None:
    assert spans_of(["a", "\n\n", "b", "\n\n"], start=37) == [(37, 39), (39, 41)]


def test_step_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--reasoncache-max-step-tokens must be .* got 0"):
        Segmenter(TokenClasses(str), 0)


def test_each_token_is_decoded_once_and_the_cache_is_bounded() -> None:
    seen: list[int] = []

    def decode_one(token_id: int) -> str:
        seen.append(token_id)
        return "x"

    classes = TokenClasses(decode_one, max_entries=4)
    for token_id in [1, 2, 1, 2, 1]:
        classes(token_id)
    assert seen == [1, 2]
    for token_id in range(100):
        classes(token_id)
        assert len(classes) <= 4


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


_TEXT = """Let me think. We have x + 1 = 2, so x = 1.

Wait, 3 + 4 = 7?  \n \nYes.


Now the code:
```python
def f(x):
    return x + 1

```

Ünïcödé — 数学 and 😀 tokens.\r\n\r\nDone
\t
Really done.\n
"""


@pytest.mark.parametrize("vocab_size", [256, 300, 420])
@pytest.mark.parametrize("is_merging", [True, False])
def test_byte_level_bpe(vocab_size: int, is_merging: bool) -> None:
    """A real tokenizer, multi-byte characters split over tokens included."""
    tokenizer = Tokenizer(models.BPE())
    # With `[\r\n]*` after punctuation, delimiters merge as in common models.
    pattern = (
        r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
        if is_merging
        else r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]|\s"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT * 4], trainer)
    ids = tokenizer.encode(_TEXT).ids
    if is_merging and vocab_size > 256:
        assert any(".\n\n" in tokenizer.decode([i]) for i in ids)
    segmenter = Segmenter(TokenClasses(lambda i: tokenizer.decode([i])), 1000)
    spans = [segmenter.push(token, i) for i, token in enumerate(ids)]
    steps = [tokenizer.decode(ids[span[0] : span[1]]) for span in spans if span is not None]
    assert [step.strip() for step in steps] == split_text(_TEXT)


def test_word_level() -> None:
    words = Words()
    ids = words.encode("so c 7 , \n\n now next . \n\n \n\n end")
    segmenter = Segmenter(words.classes, 1000)
    spans = [segmenter.push(token, i) for i, token in enumerate(ids)]
    assert [span for span in spans if span] == [(0, 5), (5, 9)]
