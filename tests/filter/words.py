# SPDX-License-Identifier: Apache-2.0
"""A word-level tokenizer for tests. A blank line is one token."""

import re
import string
from typing import Any

from sglang_reasoncache.filter.segment import Step, TokenClasses
from sglang_reasoncache.filter.settings import PRESETS
from sglang_reasoncache.filter.vocabulary import Vocabulary

_PLAIN = r"""
after again all and at because before clear down end for here in is it know later line look need
next not now of one out python range return so that the three to total two up value was wait we
\( \) ```
"""

# Add words here as tests need them.
_WORDS = (
    "\n\n", "", "<think>", "</think>", *string.digits, *string.ascii_letters, *string.punctuation,
    *(f"w{i}" for i in range(500)), *_PLAIN.split(),
)  # fmt: skip
_IDS = {word: i for i, word in enumerate(_WORDS)}


class Words:
    """A tokenizer whose tokens are the words in ``_WORDS``. A token's bytes are a space and the word."""

    vocabulary = Vocabulary([f" {word}".encode() if word else b"" for word in _WORDS])
    classes = TokenClasses(vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of the words. Raises KeyError if a word is not in ``_WORDS``."""
        return [_IDS[word] for word in re.findall(r"\n\n|\S+", text)]

    def decode(self, token_ids: list[int]) -> str:
        """The words with single spaces between them."""
        return self.vocabulary.text(token_ids).removeprefix(" ")


def filter_knobs(preset: str) -> dict[str, Any]:
    """A preset's settings that :class:`FilterConfig` has: all but ``when`` and those for KV distances."""
    stage_two = ("percentile", "warmup", "distance", "when")
    return {name: value for name, value in PRESETS[preset].items() if name not in stage_two}


def step_of(token_ids: list[int], start: int = 0, text: str | None = None) -> Step:
    """A step. Unless ``text`` is given, the step's text has one character for each token."""
    return Step.build(start, token_ids, "x" * len(token_ids) if text is None else text)


def with_length_factor(cosine: float, a: Step, b: Step) -> float:
    return cosine * min(a.num_chars, b.num_chars) / max(a.num_chars, b.num_chars)
