# SPDX-License-Identifier: Apache-2.0
"""The steps of a live token stream: which of its tokens are reasoning, where a step ends, and
what is known of a finished one.

A step ends at a blank line: a newline, any spaces, tabs or carriage returns, and another newline,
spread over tokens in many ways. All four characters are ASCII, so bytes say all there is to say,
whether or not a token holds whole characters. Each token of a vocabulary is classified once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sglang_reasoncache.filter.structure.signature import Signature
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
    ``start``: position where the open step started; None between two steps.
    """

    def __init__(self, classes: TokenClasses, max_step_tokens: int) -> None:
        self._classes = classes
        self._max_step_tokens = max_step_tokens
        self.start: int | None = None
        # The open step ends in a newline and nothing visible since.
        self._pending_newline = False

    def push(self, token_id: int, position: int) -> tuple[int, int] | None:
        """Take the next token; positions must be consecutive.

        Returns ``[start, end)`` of the step that it finished, or None. ``end`` is ``position +
        1``, or ``position`` where the token itself starts the next step.
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


@dataclass(slots=True, eq=False)
class Step:
    """One step: the tokens between two blank lines of a response."""

    start: int  # logical position of the first token in the request's sequence
    end: int  # one past the last token; the separator token is inside
    token_ids: tuple[int, ...]  # ``end - start`` ids, separator included
    #: Characters of the decoded step without white space around it, at least 1 (|S| of stage 1).
    num_chars: int
    #: Occurrences of each token id, blank ones at the end left out: the papers' step is the text
    #: *between* two blank lines.
    bag: Counter[int]
    norm_sq: int  # squared Euclidean norm of the counts, an exact integer
    text: str = ""  # decoded step; emptied once ``signature`` makes it needless
    in_code: bool = False  # the step begins inside a code fence opened by an earlier step
    signature: Signature | None = None  # filled at most once, only when a candidate needs it

    @classmethod
    def build(
        cls,
        start: int,
        token_ids: Sequence[int],
        text: str,
        num_blank_tail: int = 0,
        in_code: bool = False,
    ) -> Step:
        """Make a step of its tokens and their text. The last ``num_blank_tail`` tokens are blank;
        ValueError where all are."""
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
    """Tells which tokens of one response are reasoning, O(1) a token. Not thread safe.

    A marker is a single token and no reasoning itself. A token that is both a start and an end
    marker ends reasoning. ``inside``: whether the next token is reasoning, unless it is a marker.
    """

    __slots__ = ("_end_ids", "_start_ids", "inside")

    def __init__(self, start_ids: frozenset[int], end_ids: frozenset[int], inside: bool) -> None:
        self._start_ids = start_ids
        self._end_ids = end_ids
        self.inside = inside

    def push(self, token_id: int) -> bool:
        """Take the next token; whether it is reasoning. A token that is not ends the open step."""
        if token_id in self._end_ids or token_id in self._start_ids:
            self.inside = token_id not in self._end_ids
            return False
        return self.inside


class ReasoningMarkers(NamedTuple):
    """Tokens that open and close reasoning, and whether a response begins inside (``force``)
    after a prompt without any."""

    start_ids: frozenset[int]
    end_ids: frozenset[int]
    force: bool

    def inside_after(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the response to a prompt begins inside reasoning.

        The last marker of the prompt decides, which a template may have put there; without one,
        ``force``. An earlier turn's end counts too: a response whose reasoning then starts
        without a marker shares nothing.
        """
        # Vectorised: a prompt may have 100 000 tokens, and the scheduler waits.
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        marks = np.flatnonzero(np.isin(prompt, [*self.start_ids, *self.end_ids]))
        return int(prompt[marks[-1]]) not in self.end_ids if len(marks) else self.force
