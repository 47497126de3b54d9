# SPDX-License-Identifier: Apache-2.0
"""Tokens of a response: by any Hugging Face tokenizer, or words and punctuation marks."""

import re
from pathlib import Path
from typing import NamedTuple

from eval.tokenizers import TokenizerError, load_tokenizer
from sglang_reasoncache.filter.segment import Step, TokenClasses
from sglang_reasoncache.filter.vocabulary import Vocabulary, vocabulary_of

WORDS = "words"
# Lossless, for structure is read from the text: a space goes with the word behind it.
_PIECES = re.compile(r"[ ]?(?:\w+|[^\w\s])|\s", re.UNICODE)


class Spelled(NamedTuple):
    """A response as tokens."""

    token_ids: list[int]
    vocabulary: Vocabulary
    classes: TokenClasses
    # What a token counts as in a bag of tokens, by id, negative for nothing; None: as itself.
    bag_ids: list[int] | None

    def bagged(self, step: Step) -> Step:
        """The step with the bag that similarities are computed from."""
        if self.bag_ids is None:
            return step
        bag = [kind for i in step.token_ids if (kind := self.bag_ids[i]) >= 0]
        text = self.vocabulary.text(step.token_ids)
        return Step.build(step.start, bag, text) if bag else step


class WordSpeller:
    r"""Tokens ``\w+|[^\w\s]``, the ids fresh for each response: no table that grows. In a bag a
    word counts as the same with and without a space before it, and white space not at all; blocks
    have to agree in the space as well."""

    name = WORDS

    def spell(self, text: str) -> Spelled:
        ids: dict[str, int] = {}
        token_ids = [ids.setdefault(piece, len(ids)) for piece in _PIECES.findall(text)]
        vocabulary = Vocabulary([piece.encode() for piece in ids])
        words = {"": -1}
        bag_ids = [words.setdefault(piece.strip(), len(words)) for piece in ids]
        return Spelled(token_ids, vocabulary, TokenClasses(vocabulary), bag_ids)


class TokenizerSpeller:
    """The tokens of a Hugging Face tokenizer in a local folder. Raises ValueError: no tokenizer
    there, or one that cannot be read."""

    def __init__(self, folder: str) -> None:
        path = Path(folder)
        if not path.is_dir():
            raise ValueError(f"--tokenizer must be {WORDS!r} or a folder, got {folder!r}")
        try:
            self._tokenizer = load_tokenizer(folder, local=True)
        except TokenizerError as error:
            raise ValueError(f"--tokenizer: {error}") from error
        self.name = path.resolve().name
        self._vocabulary = vocabulary_of(self._tokenizer)
        self._classes = TokenClasses(self._vocabulary)

    def spell(self, text: str) -> Spelled:
        token_ids = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return Spelled(list(token_ids), self._vocabulary, self._classes, None)
