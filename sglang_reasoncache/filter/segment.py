# SPDX-License-Identifier: Apache-2.0
"""Finding the steps in a live token stream: a step ends at a blank line.

A blank line is a newline, any spaces, tabs or carriage returns, and another newline, spread over
tokens in many ways. All four characters are ASCII, so bytes say all there is to say, whether or
not a token holds whole characters. Each token of a vocabulary is classified once.
"""

from __future__ import annotations

from sglang_reasoncache.filter.vocabulary import Vocabulary

_WHITE = b" \t\r"

# What a token's text says about blank lines, as bits; 0 for most tokens.
BLANK = 1  # White space only, or empty.
STARTS = 2  # A newline comes before anything visible.
ENDS = 4  # Nothing visible comes after the last newline.
OPENS = 8  # A blank line comes before anything visible.
CLOSES = 16  # A blank line comes after something visible.


def classify(piece: bytes) -> int:
    """The bits of one token's bytes."""
    # Whether each line shows anything.
    lines = [bool(line.strip(_WHITE)) for line in piece.split(b"\n")]
    is_visible = any(lines)
    found = 0 if is_visible else BLANK
    if len(lines) > 1:
        found |= STARTS * (not lines[0]) | ENDS * (not lines[-1])
        if len(lines) > 2:
            found |= OPENS * (not any(lines[:2]))
        if is_visible:
            found |= CLOSES * (False in lines[lines.index(True) + 1 : -1])
    return found


class TokenClasses:
    """Token id to its bits; shared by all requests. An id outside the vocabulary is blank."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._flags = bytes(map(classify, vocabulary.pieces))

    def __call__(self, token_id: int) -> int:
        return self._flags[token_id] if 0 <= token_id < len(self._flags) else BLANK


class Segmenter:
    """Splits one request's token stream into steps, O(1) a token. Not thread safe.

    The delimiter belongs to the step it ends. Blank tokens between steps belong to none: a
    step starts at its first visible token. A token that completes a blank line and goes on
    with text starts the next step instead. A step of ``max_step_tokens`` tokens is cut there.

    Attributes:
        start: position where the open step started; None between two steps.
    """

    def __init__(self, classes: TokenClasses, max_step_tokens: int) -> None:
        self._classes = classes
        self._max_step_tokens = max_step_tokens
        self.start: int | None = None
        # The open step ends in a newline and nothing visible since.
        self._pending_newline = False

    def push(self, token_id: int, position: int) -> tuple[int, int] | None:
        """Take the next token; positions must be consecutive.

        Returns:
            ``(start, end)`` of the step this token finished, half-open, or None. ``end`` is
            ``position + 1``, or ``position`` where the token itself starts the next step.
        """
        flags = self._classes(token_id)
        start = self.start
        if start is None:
            if flags & BLANK:
                return None
            self.start = start = position
            if flags & CLOSES:
                return self.close(position + 1)
        elif flags:
            opens = flags & OPENS or (self._pending_newline and flags & STARTS)
            if opens and not flags & (BLANK | CLOSES):
                self.start = position
                self._pending_newline = bool(flags & ENDS)
                return start, position
            if opens or flags & CLOSES:
                return self.close(position + 1)
        if flags & ENDS:
            self._pending_newline = True
        elif not flags & BLANK:
            self._pending_newline = False
        if position + 1 - start >= self._max_step_tokens:
            return self.close(position + 1)
        return None

    def close(self, end: int) -> tuple[int, int] | None:
        """End the open step, if there is one, before position ``end``."""
        start, self.start = self.start, None
        self._pending_newline = False
        return None if start is None else (start, end)
