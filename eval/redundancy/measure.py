# SPDX-License-Identifier: Apache-2.0
"""Tokens of responses, and counts over them with the production filter."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from eval.tokenizers import TokenizerError, load_tokenizer
from sglang_reasoncache.filter.lexical import LexicalIndex
from sglang_reasoncache.filter.proposal import Proposal
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import ReasoningSpan, Step, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
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
    r"""Tokens ``\w+|[^\w\s]``, the ids fresh for each response. In a bag a word is the same with
    and without a space before it, and white space counts not at all; blocks agree in it as well."""

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


BLOCKS = (4, 8, 16)
LEVELS = (0.8, 0.9)
#: Similarities, and whether they have the length factor.
SIMILARITIES = {"with_length_factor": True, "plain_cosine": False}
#: Which candidates' blocks are shared, and whether formal content must agree.
RULES = {"candidate": False, "structure": True}

#: Sums over responses. Of ``steps`` (a last one without a blank line behind it included)
#: ``later_steps`` have an earlier one, ``candidates`` one over the dynamic threshold, and of
#: ``(similarity, level)`` the best similarity exceeds the level. ``(rule, block)``: tokens in proposed
#: blocks at the end; ``(rule, block, "over_time")`` and ``held_over_time`` (all tokens so far): summed
#: over decode steps.
Totals = Counter[Any]


def measure(spelled: Spelled) -> Totals:
    tokens = len(spelled.token_ids)
    found: Totals = Counter(responses=1, tokens=tokens, held_over_time=tokens * (tokens + 1) // 2)
    proposals: list[Proposal] = []
    for rule, structure in RULES.items():
        for block in BLOCKS:
            proposals = propose(spelled, FilterConfig(block=block, use_structure=structure))
            for proposal in proposals:
                size = block * len(proposal.pairs)
                found[rule, block] += size
                # Shared from the token that ends the step on.
                found[rule, block, "over_time"] += size * (tokens - proposal.step.end + 1)
    found["steps"], found["later_steps"] = len(proposals), max(0, len(proposals) - 1)
    # Similarities do not depend on the rule.
    history = FilterConfig().max_history_steps
    indexes = {name: LexicalIndex(history, factor) for name, factor in SIMILARITIES.items()}
    for proposal in proposals:
        found["candidates"] += bool(proposal.counters.candidates)
        step = spelled.bagged(proposal.step)
        for name, index in indexes.items():
            if len(index):
                best = float(index.similarities(step).max())
                for level in LEVELS:
                    found[name, level] += best > level
            index.add(step)
    return found


def propose(spelled: Spelled, config: FilterConfig) -> list[Proposal]:
    """What the filter proposes for each finished step."""
    end = len(spelled.vocabulary.pieces)  # an id that no token has
    span = ReasoningSpan(frozenset(), frozenset({end}), inside=True)
    request = RequestFilter(config, spelled.classes, spelled.vocabulary, 0, span)
    # The marker finishes the last step.
    return [*request.push(spelled.token_ids), *request.push([end])]
