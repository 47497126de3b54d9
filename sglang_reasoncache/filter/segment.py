# SPDX-License-Identifier: Apache-2.0
"""Finding the steps in a live token stream: a step ends at a blank line.

A blank line is a newline, any spaces, tabs or carriage returns, and another
newline. Tokenizers spell it in many ways: ``"\\n\\n"``, ``".\\n\\n"``, ``"\\n"``
twice, ``".\\n"`` then ``"  \\n"``. All four characters are ASCII, so a token's bytes
say all there is to say, whether or not it holds whole characters. Each token
of a vocabulary is looked at once; afterwards a token costs one look-up and a
few tests.
"""

from __future__ import annotations

import re
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from sglang_reasoncache.filter.vocabulary import Vocabulary

# Runs of one character class between newlines: no ambiguity to backtrack over.
_BLANK_LINE = re.compile(rb"\n[ \t\r]*\n")
_STARTS_NEWLINE = re.compile(rb"[ \t\r]*\n")
_ENDS_NEWLINE = re.compile(rb"\n[ \t\r]*\Z")
_VISIBLE = re.compile(rb"[^ \t\r\n]")


class TokenClass(IntFlag):
    """What a token's text says about blank lines; 0 for most tokens."""

    BLANK = 1
    """White space only. An empty text counts: there is nothing to see."""
    STARTS_NEWLINE = 2
    """A newline comes before anything visible."""
    ENDS_NEWLINE = 4
    """Nothing visible comes after the last newline."""
    OPENS_WITH_BLANK_LINE = 8
    """A blank line comes before anything visible."""
    CLOSES_WITH_BLANK_LINE = 16
    """A blank line comes after something visible."""


def classify(piece: bytes) -> TokenClass:
    """The class of one token's bytes."""
    visible = _VISIBLE.search(piece)
    found = TokenClass(0) if visible else TokenClass.BLANK
    if b"\n" not in piece:
        return found
    if _STARTS_NEWLINE.match(piece):
        found |= TokenClass.STARTS_NEWLINE
    if _ENDS_NEWLINE.search(piece):
        found |= TokenClass.ENDS_NEWLINE
    lead = visible.start() if visible else len(piece)
    if _BLANK_LINE.search(piece, 0, lead):
        found |= TokenClass.OPENS_WITH_BLANK_LINE
    if visible and _BLANK_LINE.search(piece, lead):
        found |= TokenClass.CLOSES_WITH_BLANK_LINE
    return found


class TokenClasses:
    """Token id to :class:`TokenClass`; shared by all requests of a tokenizer.

    Ids outside the vocabulary have no text, so they are blank.

    Attributes:
        flags: shape [size], uint8, one :class:`TokenClass` per id.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.flags = _flags(vocabulary)
        self.flags.flags.writeable = False
        # Indexing bytes costs a third of indexing an array.
        self._flags = self.flags.tobytes()

    def __call__(self, token_id: int) -> int:
        """The flags of ``token_id`` as a plain int (quicker to test)."""
        return self._flags[token_id] if 0 <= token_id < len(self._flags) else _BLANK

    def is_blank(self, token_id: int) -> bool:
        """The token shows nothing but white space."""
        return bool(self(token_id) & _BLANK)

    def __len__(self) -> int:
        return len(self._flags)


def _flags(vocabulary: Vocabulary) -> npt.NDArray[np.uint8]:
    """Only tokens with a newline are looked at one by one."""
    data = np.frombuffer(vocabulary.blob, dtype=np.uint8)
    visible = _count(vocabulary, ~np.isin(data, np.frombuffer(b" \t\r\n", dtype=np.uint8)))
    newlines = _count(vocabulary, data == ord("\n"))
    flags = np.where(visible == 0, _BLANK, 0).astype(np.uint8)
    for token_id in np.flatnonzero(newlines).tolist():
        flags[token_id] = classify(vocabulary.bytes_of(token_id))
    return flags


def _count(vocabulary: Vocabulary, marked: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """How many bytes of each token are marked, shape [size]."""
    before = np.concatenate([[0], np.cumsum(marked, dtype=np.int64)])
    found: npt.NDArray[np.int64] = np.diff(before[vocabulary.offsets])
    return found


# Plain ints: testing an IntFlag member costs a method call.
_BLANK = int(TokenClass.BLANK)
_STARTS_NEWLINE_FLAG = int(TokenClass.STARTS_NEWLINE)
_ENDS_NEWLINE_FLAG = int(TokenClass.ENDS_NEWLINE)
_OPENS = int(TokenClass.OPENS_WITH_BLANK_LINE)
_CLOSES = int(TokenClass.CLOSES_WITH_BLANK_LINE)


class Segmenter:
    """Splits one request's token stream into steps, O(1) a token.

    The delimiter belongs to the step it ends, merged (``".\\n\\n"``) or not.
    Blank tokens between steps belong to none: a step starts at its first
    visible token. A token that completes a blank line and goes on with text
    starts the next step instead. A step of ``max_step_tokens`` tokens is cut
    there.

    Not thread safe; owned by one request.

    Raises:
        ValueError: ``max_step_tokens`` below 1.
    """

    def __init__(self, classes: TokenClasses, max_step_tokens: int) -> None:
        if max_step_tokens < 1:
            raise ValueError(
                f"--reasoncache-max-step-tokens must be at least 1, got {max_step_tokens}"
            )
        self._classes = classes
        self._max_step_tokens = max_step_tokens
        self._start: int | None = None
        # The open step ends in a newline and nothing visible since.
        self._pending_newline = False

    @property
    def start(self) -> int | None:
        """Position where the open step started; None between two steps."""
        return self._start

    def push(self, token_id: int, position: int) -> tuple[int, int] | None:
        """Take the next token; positions must be consecutive.

        Returns:
            ``(start, end)`` of the step this token finished, half-open, or
            None. ``end`` is ``position + 1``, or ``position`` where the token
            itself starts the next step.
        """
        flags = self._classes(token_id)
        start = self._start
        if start is None:
            if flags & _BLANK:
                return None
            self._start = start = position
            if flags & _CLOSES:
                return self._finish(start, position + 1)
        elif flags:
            opens = flags & _OPENS or (self._pending_newline and flags & _STARTS_NEWLINE_FLAG)
            if opens and not flags & (_BLANK | _CLOSES):
                self._start = position
                self._pending_newline = bool(flags & _ENDS_NEWLINE_FLAG)
                return start, position
            if opens or flags & _CLOSES:
                return self._finish(start, position + 1)
        if flags & _ENDS_NEWLINE_FLAG:
            self._pending_newline = True
        elif not flags & _BLANK:
            self._pending_newline = False
        if position + 1 - start >= self._max_step_tokens:
            return self._finish(start, position + 1)
        return None

    def close(self, end: int) -> tuple[int, int] | None:
        """End the open step before position ``end`` without a blank line, if there is one."""
        return None if self._start is None else self._finish(self._start, end)

    def _finish(self, start: int, end: int) -> tuple[int, int]:
        self._start = None
        self._pending_newline = False
        return start, end
