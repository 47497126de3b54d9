# SPDX-License-Identifier: Apache-2.0
"""Finding the steps in a live token stream: a step ends at a blank line.

A blank line is a newline, any spaces, tabs or carriage returns, and another
newline. Tokenizers spell it in many ways: ``"\\n\\n"``, ``".\\n\\n"``, ``"\\n"``
twice, ``".\\n"`` then ``"  \\n"``. Each token id is looked at once, as text;
afterwards a token costs one dictionary look-up and a few tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntFlag

# Runs of one character class between newlines: no ambiguity to backtrack over.
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_STARTS_NEWLINE = re.compile(r"[ \t\r]*\n")
_ENDS_NEWLINE = re.compile(r"\n[ \t\r]*\Z")
_VISIBLE = re.compile(r"[^ \t\r\n]")

# A token is short; a longer one is classified by its two ends.
_MAX_TOKEN_CHARS = 256


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


def classify(text: str) -> TokenClass:
    """The class of one token's text."""
    if len(text) > _MAX_TOKEN_CHARS:
        half = _MAX_TOKEN_CHARS // 2
        text = text[:half] + text[-half:]
    visible = _VISIBLE.search(text)
    found = TokenClass(0) if visible else TokenClass.BLANK
    if "\n" not in text:
        return found
    if _STARTS_NEWLINE.match(text):
        found |= TokenClass.STARTS_NEWLINE
    if _ENDS_NEWLINE.search(text):
        found |= TokenClass.ENDS_NEWLINE
    lead = visible.start() if visible else len(text)
    if _BLANK_LINE.search(text, 0, lead):
        found |= TokenClass.OPENS_WITH_BLANK_LINE
    if visible and _BLANK_LINE.search(text, lead):
        found |= TokenClass.CLOSES_WITH_BLANK_LINE
    return found


class TokenClasses:
    """Token id to :class:`TokenClass`, computed on first use; shared by requests.

    Args:
        decode_one: text of a single token id.
        max_entries: cached ids; the cache is emptied when it is full, so that
            ids beyond any vocabulary cannot grow it.
    """

    def __init__(self, decode_one: Callable[[int], str], max_entries: int = 1 << 18) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        self._decode_one = decode_one
        self._max_entries = max_entries
        self._classes: dict[int, int] = {}

    def __call__(self, token_id: int) -> int:
        """The flags of ``token_id`` as a plain int (quicker to test)."""
        found = self._classes.get(token_id)
        if found is None:
            if len(self._classes) >= self._max_entries:
                self._classes.clear()
            found = int(classify(self._decode_one(token_id)))
            self._classes[token_id] = found
        return found

    def is_blank(self, token_id: int) -> bool:
        """The token shows nothing but white space."""
        return bool(self(token_id) & _BLANK)

    def __len__(self) -> int:
        return len(self._classes)


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

    def _finish(self, start: int, end: int) -> tuple[int, int]:
        self._start = None
        self._pending_newline = False
        return start, end
