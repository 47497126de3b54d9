# SPDX-License-Identifier: Apache-2.0
"""Makes needles in haystacks: long texts that state one fact, at a chosen depth, for which a question asks."""

import random
from typing import NamedTuple

#: Lengths of the haystacks in words, and depths of the needle: 0 at the text's beginning, 100 at its end.
LENGTHS = (500, 1000, 2000, 4000)
DEPTHS = (0, 25, 50, 75, 100)
_PLACES = (
    "Aldmoor",
    "Brenhaven",
    "Corwick",
    "Dunleigh",
    "Eastmere",
    "Farrowby",
    "Glenholt",
    "Harwood",
    "Inverley",
    "Kelham",
)
_THINGS = (
    "bridge",
    "market",
    "library",
    "station",
    "harbour",
    "garden",
    "museum",
    "theatre",
    "mill",
    "tower",
    "school",
    "park",
)
_VERBS = (
    "opened",
    "closed",
    "moved",
    "burned",
    "grew",
    "shrank",
    "reopened",
    "vanished",
    "returned",
    "changed",
)
_TIMES = (
    "spring",
    "summer",
    "autumn",
    "winter",
    "January",
    "March",
    "May",
    "July",
    "September",
    "November",
)


class Needle(NamedTuple):
    """A haystack with its needle, the question, the answer, and the ``group`` of its length and depth."""

    text: str
    question: str
    answer: str
    group: str


def make(seed: int, number: int, lengths: tuple[int, ...] = LENGTHS) -> Needle:
    """The needle of this number. Numbers that follow one another go through all lengths and depths."""
    drawn = random.Random(f"{seed} {number}")
    length = lengths[number % len(lengths)]
    depth = DEPTHS[number // len(lengths) % len(DEPTHS)]
    sentences: list[str] = []
    words = 0
    while words < length:
        sentence = _sentence(drawn)
        sentences.append(sentence)
        words += len(sentence.split())
    place = drawn.choice(_PLACES)
    answer = str(drawn.randrange(100_000, 1_000_000))
    sentences.insert(
        round(len(sentences) * depth / 100), f"The secret number of {place} is {answer}."
    )
    question = f"What is the secret number of {place}? Answer with the number alone."
    return Needle(" ".join(sentences), question, answer, f"{length}-{depth}")


def _sentence(drawn: random.Random) -> str:
    place = drawn.choice(_PLACES)
    thing = drawn.choice(_THINGS)
    verb = drawn.choice(_VERBS)
    time = drawn.choice(_TIMES)
    other = drawn.choice(_THINGS)
    return f"The {thing} of {place} {verb} in the {time} of {drawn.randrange(1800, 2000)}, near the {other}."
