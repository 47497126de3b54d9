# SPDX-License-Identifier: Apache-2.0
"""Bytes of tokens, and reading them off tokenizers of every kind."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of
from tests.filter.made_tokenizers import NAMES, TEXT, made, read

_BYTE_EXACT = ["gpt2", "cl100k", "o200k", "no_split", "llama2"]


@given(st.lists(st.binary(max_size=5), max_size=30), st.lists(st.integers(-3, 40), max_size=40))
def test_text_is_the_concatenation(pieces: list[bytes], token_ids: list[int]) -> None:
    vocabulary = Vocabulary(pieces)
    assert vocabulary.pieces == tuple(pieces)
    expected = b"".join(pieces[i] for i in token_ids if 0 <= i < len(pieces))
    assert vocabulary.text([*token_ids, 1 << 40]) == expected.decode(errors="replace")


@pytest.mark.parametrize("name", NAMES)
def test_same_text_as_the_tokenizer(name: str) -> None:
    """But for the space before the first word, and with its markers."""
    tokenizer, vocabulary = made(name), read(name)
    assert len(vocabulary.pieces) == len(tokenizer)
    # Llama 2 puts a space behind a special token.
    if name in _BYTE_EXACT and name != "llama2":
        assert vocabulary.text(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT
    for marker in ("<think>", "</think>"):
        assert vocabulary.text([tokenizer.convert_tokens_to_ids(marker)]).strip() == marker


@pytest.mark.parametrize("name", _BYTE_EXACT)
def test_any_bytes_can_be_spelled(name: str) -> None:
    """Half characters too: reading each token through ``decode`` would lose them."""
    single = set(read(name).pieces)
    valid = [byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5]
    assert all(bytes([byte]) in single for byte in valid)


class _Custom:
    """A tokenizer with code of its own around tiktoken, as some models bring along."""

    eos_token_id = 300

    def __init__(self, key_type: type) -> None:
        ranks = {bytes([byte]): byte for byte in range(256)}
        for piece in (b"\n\n", b".\n", b".\n\n", b"th", b"the", b" x"):
            ranks[piece] = len(ranks)
        specials = {"<eos>": 300, "</think>": 301}
        self.tokenizer = tiktoken.Encoding("made", pat_str=r"\S+\n*|\s+", mergeable_ranks=ranks,
                                           special_tokens=specials)  # fmt: skip
        self._vocab: dict[Any, int] = dict(specials)
        for piece, i in ranks.items():
            self._vocab[piece if key_type is bytes else piece.decode("latin-1")] = i

    def __len__(self) -> int:
        return 302

    def get_vocab(self) -> dict[Any, int]:
        return self._vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, allowed_special="all")

    def decode(self, token_ids: list[int]) -> str:
        known = [i for i in token_ids if i < 262 or i in (300, 301)]
        return self.tokenizer.decode(known)

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
        return [self.decode([i]) for i in token_ids]


def test_a_tiktoken_tokenizer_is_read_exactly() -> None:
    tokenizer = _Custom(bytes)
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.text(tokenizer.encode(TEXT)) == TEXT
    assert vocabulary.pieces[258] == b".\n\n"
    found = [vocabulary.pieces[i] for i in (0xE6, 280, 300, 301)]
    assert found == [b"\xe6", b"", b"<eos>", b"</think>"]


def test_a_tokenizer_that_misstates_its_pieces_is_read_by_decoding(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its vocabulary spells bytes as Latin-1, which XGrammar cannot know."""
    tokenizer = _Custom(str)
    with caplog.at_level(logging.INFO, "sglang_reasoncache"):
        vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.text(tokenizer.encode("the x. (y)\n\nz")) == "the x. (y)\n\nz"
    # Characters over several tokens cannot be read that way, which is said.
    assert "sequences differ" in caplog.text


def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot read the tokens of int"):
        vocabulary_of(5)
