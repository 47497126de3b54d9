# SPDX-License-Identifier: Apache-2.0
"""A finished reasoning step, as the filter sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_reasoncache.filter.structure.signature import Signature


@dataclass(slots=True, eq=False)
class Step:
    """One step: the tokens between two blank lines of a response.

    Attributes:
        start: logical position of the first token in the request's sequence.
        end: one past the last token; the separator token is inside.
        token_ids: ``end - start`` ids, separator included.
        num_chars: length of the decoded step without surrounding white space, in characters,
            at least 1 (|S| of ReasonCache, stage 1).
        bag: occurrences of each token id, blank ones at the end left out: the papers' step is
            the text *between* two blank lines.
        norm_sq: squared Euclidean norm of the counts, an exact integer.
        text: decoded step; emptied once ``signature`` makes it needless.
        in_code: the step begins inside a code fence opened by an earlier step.
        signature: structure signature, filled at most once and only when a candidate needs it.
    """

    start: int
    end: int
    token_ids: tuple[int, ...]
    num_chars: int
    bag: Counter[int]
    norm_sq: int
    text: str = ""
    in_code: bool = False
    signature: Signature | None = None

    @classmethod
    def build(
        cls,
        start: int,
        token_ids: Sequence[int],
        text: str,
        num_blank_tail: int = 0,
        in_code: bool = False,
    ) -> Step:
        """Make a step of its tokens, whose last ``num_blank_tail`` are blank, and their text.

        Raises:
            ValueError: no tokens, or nothing but blank ones.
        """
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
