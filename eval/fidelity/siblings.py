# SPDX-License-Identifier: Apache-2.0
"""Responses to one prompt that are read together: what the plugin's filter lets them share, and
whose slots they have then."""

from collections.abc import Iterator, Sequence

import numpy as np

from sglang_reasoncache.filter.proposal import Proposal
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.runs import RunGroup
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.sharing.state import RequestState

#: No response has as many positions.
_FAR = 1 << 32


def proposals(
    rule: FilterConfig,
    vocabulary: Vocabulary,
    siblings: Sequence[Sequence[int]],
    prompt: int,
    across: bool,
) -> Iterator[tuple[int, int, Proposal]]:
    """What the plugin's filter proposes for responses that decode together, a token each a step:
    tokens written by then, the response's index, and the proposal. Each response begins with the
    same ``prompt`` tokens. ``across``: they form a group, which a response leaves at its end."""
    classes, group = TokenClasses(vocabulary), RunGroup() if across else None
    requests = [RequestFilter(rule, classes, vocabulary, prompt) for _ in siblings]
    for number, request in enumerate(requests):
        request.join(number, group)
    for at in range(prompt, max(map(len, siblings))):
        for number, tokens in enumerate(siblings):
            if len(tokens) == at:
                requests[number].join(number, None)
        for number, tokens in enumerate(siblings):
            for proposal in requests[number].push(tokens[at : at + 1]):
                if proposal.pairs or proposal.across:
                    yield at + 1, number, proposal


class Slots:
    """Slots that one response has, the ``number``-th of its siblings; :class:`BlockPipeline`'s rules.

    ``saved``: slots of its own that it gave up.
    """

    def __init__(self, number: int) -> None:
        self._first, self._state, self.saved = number * _FAR, RequestState(), 0

    def claim(self, start: int, length: int) -> bool:
        """False where a position was claimed before."""
        return self._state.claim(start, length)

    def read(self, dst: int, src: int, length: int, lender: "Slots") -> list[tuple[int, int]]:
        """Positions that moved, with those of ``lender`` that they read now; none where another
        response has the slots, too, which moving would not free."""
        known, aliases = self._state.across, self._state.slot_aliases
        if not known.keys().isdisjoint(self._names(dst, length)):
            return []
        if lender is self:
            moved = aliases.redirect(dst, src, length)
        else:
            names = lender._names(src, length)
            for state in (self._state, lender._state):
                state.across.update(dict.fromkeys(names, 0))
            moved = aliases.assign(dst, names)
        self.saved += len({offset for _, offset in moved})
        return [(position, src + offset) for position, offset in moved]

    def foreign(self, written: int) -> int:
        """How many of the first ``written`` positions read another response's slot."""
        return int(np.count_nonzero(self._state.slot_aliases.of(np.arange(written)) < 0))

    def _names(self, start: int, length: int) -> list[int]:
        """Below 0, of no other slot of any response."""
        numbers = self._state.slot_aliases.numbers(start, length)
        return [-1 - self._first - number if number >= 0 else number for number in numbers]
