# SPDX-License-Identifier: Apache-2.0
"""The bytes of every token id, so that no step ever asks the tokenizer for its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Vocabulary:
    """What each token id adds to a text; the text of tokens is their concatenation.

    Immutable, shared by all requests. :func:`filter.tokenizer_bytes.vocabulary_of` makes one.

    Attributes:
        pieces: bytes of the tokens 0, 1, 2, ...; empty for an id without a token.
    """

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = tuple(pieces)

    @property
    def size(self) -> int:
        """Ids from 0 up to this have an entry."""
        return len(self.pieces)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""

    def text(self, token_ids: Iterable[int]) -> str:
        """The decoded text; bytes that are no UTF-8 become U+FFFD."""
        pieces = self.pieces
        size = len(pieces)
        joined = b"".join([pieces[i] for i in token_ids if 0 <= i < size])
        return joined.decode("utf-8", errors="replace")
