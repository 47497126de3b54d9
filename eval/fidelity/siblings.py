# SPDX-License-Identifier: Apache-2.0
"""Responses to one prompt that are read together: what the plugin's filter lets them share, and
whose slots they have then."""

from collections.abc import Iterator, Sequence

import numpy as np

from sglang_reasoncache.cache.host_row import UNKNOWN, HostRow, Moved
from sglang_reasoncache.filter.proposal import Proposal
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.runs import RunGroup
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary
from sglang_reasoncache.sharing.state import Candidate, RequestState

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
    """The slots of one response, the ``number``-th of its siblings, under :class:`BlockPipeline`'s rules.

    ``saved``: slots that the response gave up.
    """

    def __init__(self, number: int) -> None:
        self._first, self.saved = 1 + number * _FAR, 0
        self._state, self._row = RequestState(), HostRow()

    def claim(self, start: int, length: int) -> bool:
        """False where a position was claimed before."""
        return self._state.claim(Candidate(start, start), length)

    def read(self, dst: int, src: int, length: int, lender: "Slots") -> list[tuple[int, int]]:
        """Positions that moved, with those of ``lender`` that they read now; none where another
        response has the slots, too, which moving would not free."""
        lender._located(src, length)
        if not self._row.in_other_rows.isdisjoint(self._located(dst, length)):
            return []
        moves: list[Moved] = []
        self._row.read(dst, src, length, lender._row, moves)
        self.saved += sum(bool(move.positions) for move in moves)
        return [
            (position, src + offset)
            for offset, move in enumerate(moves)
            for position in move.positions
        ]

    def foreign(self, written: int) -> int:
        """Of so many positions those whose slot is another response's."""
        slots = self._row.between(0, written)
        slots = slots[slots != UNKNOWN]
        return int(np.count_nonzero((slots - 1) // _FAR != (self._first - 1) // _FAR))

    def _located(self, start: int, length: int) -> list[int]:
        """The slots of these positions: a response's first ones are its own."""
        self._row.locate(start, range(self._first + start, self._first + start + length))
        found: list[int] = self._row.between(start, start + length).tolist()
        return found
