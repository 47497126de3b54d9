# SPDX-License-Identifier: Apache-2.0
"""The bytes of every token id, so that no step ever asks the tokenizer for its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


class Vocabulary:
    """What each token id adds to a text, in bytes; the text of tokens is their concatenation.

    Immutable and shared by all requests of a tokenizer. ``plugin.vocabulary`` makes
    one from a tokenizer.

    Attributes:
        blob: the bytes of all tokens, one after the other, in order of their ids.
        offsets: shape [size + 1], uint32 (uint64 from 4 GiB on); token ``i`` is
            ``blob[offsets[i]:offsets[i + 1]]``.
    """

    __slots__ = ("_pieces", "blob", "offsets")

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """Take the bytes of the tokens 0, 1, 2, ...; an id without a token is empty."""
        # Slicing is what a native library does; Python is faster with ready objects.
        self._pieces = tuple(bytes(piece) for piece in pieces)
        self.blob = b"".join(self._pieces)
        offsets = np.zeros(len(self._pieces) + 1, dtype=np.uint64)
        np.cumsum([len(piece) for piece in self._pieces], out=offsets[1:], dtype=np.uint64)
        small = len(self.blob) <= np.iinfo(np.uint32).max
        self.offsets: npt.NDArray[np.unsignedinteger] = (
            offsets.astype(np.uint32) if small else offsets
        )
        self.offsets.flags.writeable = False

    @property
    def size(self) -> int:
        """Ids from 0 up to this have an entry."""
        return len(self._pieces)

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def text(self, token_ids: Iterable[int]) -> str:
        """The decoded text; bytes that are no UTF-8 become U+FFFD."""
        pieces = self._pieces
        size = len(pieces)
        joined = b"".join([pieces[i] for i in token_ids if 0 <= i < size])
        return joined.decode("utf-8", errors="replace")
