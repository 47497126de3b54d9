# SPDX-License-Identifier: Apache-2.0
"""A word-level tokenizer for tests: a blank line is a token of its own."""

from __future__ import annotations

import re

from sglang_reasoncache.policy.segment import TokenClasses
from sglang_reasoncache.policy.step import Step


class Words:
    """Grows its vocabulary as it reads; words are joined by single spaces."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []
        self.classes = TokenClasses(self.word)

    def word(self, token_id: int) -> str:
        return self._words[token_id]

    def encode(self, text: str) -> list[int]:
        found = []
        for word in re.findall(r"\n\n|\S+", text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            found.append(self._ids[word])
        return found

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self._words[i] for i in token_ids)


def step_of(token_ids: list[int], start: int = 0, text: str | None = None) -> Step:
    """A step whose text has one character per token unless given."""
    return Step.build(start, token_ids, "x" * len(token_ids) if text is None else text)
