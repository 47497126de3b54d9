# SPDX-License-Identifier: Apache-2.0
"""Tests how the text of tokens is read from tokenizers of other kinds than those of ``test_segment.py``."""

import random
from pathlib import Path
from typing import Any

import pytest

from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import BLANK, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of
from tests.filter.other_tokenizers import OTHERS

_TEXT = "let it be 1 + 2 = 3.\n\nwait, x\n"
_UNKNOWN = "\ufffd"


@pytest.fixture(scope="module", params=OTHERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return OTHERS[request.param](tmp_path_factory.mktemp(request.param))


def _decoded(tokenizer: Any, token_ids: list[int]) -> str | None:
    """None if the tokenizer raises."""
    try:
        return str(tokenizer.decode(token_ids))
    except Exception:
        return None


def _plain(text: str) -> str:
    """Without the space that a text may begin with, and with any number of bytes that are no UTF-8 as one."""
    while 2 * _UNKNOWN in text:
        text = text.replace(2 * _UNKNOWN, _UNKNOWN)
    return text.lstrip(" ")


def test_random_sequences_have_the_text_that_the_tokenizer_decodes(tokenizer: Any) -> None:
    vocabulary = vocabulary_of(tokenizer)
    size = len(vocabulary.pieces)
    rng = random.Random(1)
    text = tokenizer.encode(_TEXT, add_special_tokens=False)
    # A sequence begins with a word, because WordPiece shows ``##`` at the start of a text only.
    word = text[:1]
    sequences = [[rng.randrange(size) for _ in range(rng.randint(1, 8))] for _ in range(300)]
    # Some ids cannot be decoded, so shorter sequences, too.
    sequences += [[rng.randrange(size)] for _ in range(100)]
    compared = 0
    for ids in (text, *(word + ids for ids in sequences)):
        decoded = _decoded(tokenizer, ids)
        if decoded is None:
            continue
        compared += 1
        assert _plain(vocabulary.text(ids)) == _plain(decoded)
    assert compared > 50
    for i in range(0, size, 1 + size // 500):
        if _decoded(tokenizer, [i]) is None:
            assert vocabulary.pieces[i] == b""


def test_ids_behind_the_vocabulary_add_nothing(tokenizer: Any) -> None:
    """A model's embedding often has more rows than its tokenizer has tokens."""
    vocabulary = vocabulary_of(tokenizer)
    size = len(vocabulary.pieces)
    text = tokenizer.encode(_TEXT, add_special_tokens=False)
    assert vocabulary.text([*text, size, size + 1000]) == vocabulary.text(text)
    assert TokenClasses(vocabulary)(size) == BLANK


@pytest.mark.parametrize("name", ["tekken", "small-tekken"])
def test_a_mistral_model_is_read_whole(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes are exact, also where a character is spread over tokens. Special tokens have the text of decode."""
    tokenizer = OTHERS[name](tmp_path)
    with caplog.at_level("INFO", "sglang_reasoncache"):
        vocabulary = vocabulary_of(tokenizer)
    assert "read by library, 0 of " in caplog.text
    assert len(vocabulary.pieces) == len(tokenizer) and all(vocabulary.pieces)
    text = "Wait, é — 数学です 😀👩\u200d🔬.\n\nSo"
    assert vocabulary.text(tokenizer.encode(text, add_special_tokens=False)) == text
    assert vocabulary.pieces[:4] == (b"<unk>", b"<s>", b"</s>", b"[INST]")


@pytest.mark.parametrize("broken", ["decode", "encode", "size"])
def test_what_cannot_be_read_is_refused(broken: str) -> None:
    class Broken:
        vocab_size = 0 if broken == "size" else 9

        def encode(self, text: str, **_: Any) -> list[int]:
            return [1, 2] if broken != "encode" else [1 // 0]

        def decode(self, token_ids: list[int]) -> str:
            return "a" * len(token_ids) if broken != "decode" else str(1 / 0)

    with pytest.raises(ValueError, match="cannot read the tokens of Broken"):
        vocabulary_of(Broken())


def test_runs_are_found_without_any_text() -> None:
    """No blank line is known then, so a step is as long as the settings let it be."""
    settings = dict(match="runs", direction="oldest", block=4, min_run=4, max_step_tokens=8)
    config = FilterConfig(**settings)  # type: ignore[arg-type]
    nothing = Vocabulary(())
    request = RequestFilter(config, TokenClasses(nothing), nothing, 100)
    passage = [*range(50, 58)]
    found = [pair for one in request.push([*passage, 7, *passage, *range(7)]) for pair in one.pairs]
    assert [tuple(pair) for pair in found] == [(109, 100), (113, 104)]
