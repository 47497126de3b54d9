# SPDX-License-Identifier: Apache-2.0
"""English text for generated prompts, from Python's documentation, which every Python installation has."""

import itertools
import re
from collections.abc import Sequence
from pydoc_data.topics import topics


def prose() -> list[str]:
    """Paragraphs."""
    every = itertools.chain(*(re.split(r"\n\s*\n", text) for text in topics.values()))
    flat = (" ".join(paragraph.split()) for paragraph in every)
    return sorted({text for text in flat if _is_prose(text)})


def sentences_from(paragraphs: Sequence[str], start: int, words: int) -> list[str]:
    """Sentences of consecutive paragraphs, from number ``start`` on: at least ``words`` words in all."""
    sentences = list[str]()
    at = start
    while sum(text.count(" ") for text in sentences) < words:
        sentences += re.split(r"(?<=\.) (?=[A-Z])", paragraphs[at % len(paragraphs)])
        at += 1
    return sentences


def _is_prose(text: str) -> bool:
    letters = sum(letter.isalpha() or letter == " " for letter in text)
    return len(text) > 120 and text[-1] == "." and text.isascii() and letters > 0.9 * len(text)
