# SPDX-License-Identifier: Apache-2.0
"""Splits a token stream into steps, and tells which of its tokens are reasoning.

A step ends at a blank line: a newline, any spaces, tabs or carriage returns, and another newline. Tokenizers
spread these characters over tokens in many ways. The characters are ASCII, so a token's bytes show where they
are, even if the token ends inside a multi-byte character. Each token of a vocabulary is classified once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_reasoncache.filter.structure import Signature
from sglang_reasoncache.filter.vocabulary import Vocabulary

_WHITE = b" \t\r"

# Bits that describe a token's text. Most tokens have none. *Visible* text is anything except white space.
BLANK = 1  # White space only, or empty.
STARTS = 2  # A newline comes before anything visible.
ENDS = 4  # Nothing visible comes after the last newline.
OPENS = 8  # A blank line comes before anything visible.
CLOSES = 16  # A blank line comes after something visible.


def classify(piece: bytes) -> int:
    """The bits above (``BLANK`` and others) that describe a token with the bytes ``piece``."""
    # For each line, whether it has anything visible.
    lines = [bool(line.strip(_WHITE)) for line in piece.split(b"\n")]
    is_visible = any(lines)
    bits = 0 if is_visible else BLANK
    if len(lines) > 1:
        bits |= STARTS * (not lines[0]) | ENDS * (not lines[-1])
        if len(lines) > 2:
            bits |= OPENS * (not any(lines[:2]))
        if is_visible:
            bits |= CLOSES * (False in lines[lines.index(True) + 1 : -1])
    return bits


class TokenClasses:
    """Maps a token id to its bits. Shared by all requests. An id outside the vocabulary is blank, but all ids
    are visible text if no token's text is known."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._flags = bytes(map(classify, vocabulary.pieces))
        self._outside = BLANK if vocabulary.pieces else 0

    def __call__(self, token_id: int) -> int:
        return self._flags[token_id] if 0 <= token_id < len(self._flags) else self._outside


class Segmenter:
    """Splits one request's token stream into steps, in O(1) per token. Not thread safe.

    A step starts at a visible token and includes the blank line at its end. If all visible text of a
    token comes after the blank line, the token belongs to the next step. Further blank tokens between steps
    belong to no step. A step is cut after ``max_step_tokens`` tokens.

    Attributes:
        start: Position where the open step started; None between two steps.
    """

    def __init__(self, classes: TokenClasses, max_step_tokens: int) -> None:
        self._classes = classes
        self._max_step_tokens = max_step_tokens
        self.start: int | None = None
        # Whether the open step has a newline with nothing visible after it.
        self._pending_newline = False

    def push(self, token_id: int, position: int) -> tuple[int, int] | None:
        """Take the next token. Positions must be consecutive.

        Returns ``start`` and ``end`` (exclusive) of the step that the token finishes, or None. ``end`` is
        ``position`` if the token starts the next step, else ``position + 1``.
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
        """End the open step before position ``end``. Returns its start and end, or None."""
        start = self.start
        self.start = None
        return None if start is None else (start, end)


@dataclass(slots=True, eq=False)
class Step:
    """The tokens between two blank lines of a response, and the second blank line (the separator)."""

    start: int  # position of the first token in prompt plus output
    end: int  # one past the last token, separator included
    token_ids: tuple[int, ...]  # ``end - start`` ids, separator included
    #: Number of characters in the stripped text of the step, at least 1 (|S| in ``lexical.py``).
    num_chars: int
    #: How often each token id occurs. Blank tokens at the end do not count, because a step of the ReasonCache
    #: paper is the text *between* two blank lines.
    bag: Counter[int]
    norm_sq: int  # squared Euclidean norm of the counts, an exact integer
    text: str = ""  # decoded step; emptied once it is not needed any more
    in_code: bool = False  # whether the step begins inside a code fence of an earlier step
    signature: Signature | None = None  # filled when the structure of this step is first compared

    @classmethod
    def build(
        cls,
        start: int,
        token_ids: Sequence[int],
        text: str,
        num_blank_tail: int = 0,
        in_code: bool = False,
    ) -> Step:
        """Make a step from its tokens and their text. ``num_blank_tail``: how many tokens at the end are
        blank. Raises ValueError if all tokens are blank."""
        ids = tuple(token_ids)
        if not 0 <= num_blank_tail < len(ids):
            raise ValueError(f"num_blank_tail must be in [0, {len(ids)}), got {num_blank_tail}")
        bag = Counter(ids[: len(ids) - num_blank_tail])
        norm_sq = sum(count * count for count in bag.values())
        num_chars = max(1, len(text.strip()))
        return cls(start, start + len(ids), ids, num_chars, bag, norm_sq, text, in_code)

    def __len__(self) -> int:
        """Number of tokens, separator included."""
        return self.end - self.start


class ReasoningSpan:
    """Tells which tokens of one response are reasoning, in O(1) per token. Not thread safe.

    A marker, such as ``<think>``, is a single token and is not reasoning itself. A token that is both start
    and end marker ends reasoning.

    Attributes:
        inside: Whether the next token is reasoning, unless it is a marker.
    """

    __slots__ = ("_end_ids", "_start_ids", "inside")

    def __init__(self, start_ids: frozenset[int], end_ids: frozenset[int], inside: bool) -> None:
        self._start_ids = start_ids
        self._end_ids = end_ids
        self.inside = inside

    def push(self, token_id: int) -> bool:
        """Take the next token. Returns whether it is reasoning."""
        if token_id in self._end_ids or token_id in self._start_ids:
            self.inside = token_id not in self._end_ids
            return False
        return self.inside


class ReasoningMarkers(NamedTuple):
    """Tokens that open reasoning and tokens that close it. ``force``: whether a response begins inside
    reasoning if its prompt has no marker."""

    start_ids: frozenset[int]
    end_ids: frozenset[int]
    force: bool

    def inside_after(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the response to a prompt begins inside reasoning.

        The last marker of the prompt decides, be it from a message or from the chat template. Without a marker,
        ``force`` decides. If the last marker ends the reasoning of an earlier message, and the response begins
        to reason without a marker, nothing of the response is shared.
        """
        # Vectorised, because the scheduler waits for the result and a prompt may have 100 000 tokens.
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        marks = np.flatnonzero(np.isin(prompt, [*self.start_ids, *self.end_ids]))
        return int(prompt[marks[-1]]) not in self.end_ids if len(marks) else self.force
