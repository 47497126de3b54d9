# SPDX-License-Identifier: Apache-2.0
"""A word-level tokenizer for tests: a blank line is a token of its own."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

import pytest

from sglang_reasoncache.filter.lexical import LexicalIndex
from sglang_reasoncache.filter.presets import PRESETS
from sglang_reasoncache.filter.segment import Step, TokenClasses
from sglang_reasoncache.filter.vocabulary import Vocabulary

_PLAIN = r"""
after again all and at because before clear down end for here in is it know later line look need
next not now of one out python range return so that the three to total two up value was wait we
\( \) ```
"""

# Whoever needs another word adds it here.
_WORDS = (
    "\n\n",
    "",
    "<think>",
    "</think>",
    *string.digits,
    *string.ascii_letters,
    *string.punctuation,
    *(f"w{i}" for i in range(500)),
    *_PLAIN.split(),
)
_IDS = {word: i for i, word in enumerate(_WORDS)}


class Words:
    """A fixed list of words, each spelled with a space before it."""

    vocabulary = Vocabulary([f" {word}".encode() if word else b"" for word in _WORDS])
    classes = TokenClasses(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of the words; KeyError on one that is not in the list."""
        return [_IDS[word] for word in re.findall(r"\n\n|\S+", text)]

    def decode(self, token_ids: list[int]) -> str:
        """The words with single spaces between them."""
        return self.vocabulary.text(token_ids).removeprefix(" ")


def filter_knobs(preset: str) -> dict[str, Any]:
    """The part of a preset that :class:`FilterConfig` takes, without what decides on distances."""
    stage_two = ("percentile", "warmup", "distance")
    return {name: value for name, value in PRESETS[preset].items() if name not in stage_two}


def step_of(token_ids: list[int], start: int = 0, text: str | None = None) -> Step:
    """A step whose text has one character per token unless given."""
    return Step.build(start, token_ids, "x" * len(token_ids) if text is None else text)


def with_length_factor(cosine: float, a: Step, b: Step) -> float:
    return cosine * min(a.num_chars, b.num_chars) / max(a.num_chars, b.num_chars)


def check_index(
    index: LexicalIndex,
    drawn: list[tuple[list[int], int]],
    cosine: Callable[[Step, Step], float],
    length_factor: bool,
    max_history_steps: int,
    tolerance: float,
) -> None:
    """Add steps of (token ids, characters), and compare each with the formula before."""
    history: list[Step] = []
    for token_ids, num_chars in drawn:
        step = step_of(token_ids, text="x" * num_chars)
        kept = history[-max_history_steps:]
        sims = index.similarities(step)
        expected = [cosine(step, earlier) for earlier in kept]
        if length_factor:
            expected = [
                with_length_factor(*each, step) for each in zip(expected, kept, strict=True)
            ]
        assert (len(index), sims.shape, sims.dtype) == (len(kept), (len(kept),), float)
        assert sims == pytest.approx(expected, abs=tolerance)
        assert all(-1.0 <= sim <= 1.0 for sim in sims)
        assert all(index[i] is earlier for i, earlier in enumerate(kept))
        index.add(step)
        history.append(step)
