# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler and the filter process: pickles over a socket.

The filter process first sends the version of its package. The scheduler sends one :class:`Setup`, then
one :class:`Feed` after another as plain tuples, which pickle fastest. The filter process answers each feed
with one reply, in order. Messages to the scheduler begin with their length in bytes (:data:`LENGTH`), so that
the scheduler unpickles only complete messages. Unpickling is safe, because this package writes all messages,
and requests of clients contribute only numbers.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from typing import NamedTuple

from sglang_reasoncache.filter.matcher import AcrossPair, BlockPair, FilterCounters
from sglang_reasoncache.filter.settings import FilterConfig

LENGTH = struct.Struct("!I")

#: Tokens that open reasoning, and tokens that close it. None if all output counts as reasoning.
Markers = tuple[frozenset[int], frozenset[int]] | None


class Setup(NamedTuple):
    """The arguments of :class:`FilterProcess`. ``pieces``: the bytes of each token of the vocabulary."""

    config: FilterConfig
    pieces: tuple[bytes, ...]
    markers: Markers
    max_pending: int


class Feed(NamedTuple):
    """New tokens, and which requests were opened or closed, or changed their group, since the last feed.

    Attributes:
        steps_taken: Number of step results that the scheduler has taken since the filter process started.
        opened: New requests: id, position of the first output token, whether the output begins in reasoning,
            and the tokens of the prompt, or none if nothing shall read them.
        joined: Requests that joined or left a group (same prompt): id, and the group's number or -1 (left).
        closed: Ids of requests to forget.
        requests: Ids of the requests with new tokens.
        counts: Number of new tokens of each of ``requests``.
        tokens: All new tokens, in the order of ``requests``.
    """

    steps_taken: int
    opened: list[tuple[int, int, bool, array[int]]]
    joined: list[tuple[int, int]]
    closed: list[int]
    requests: list[int]
    counts: list[int]
    tokens: list[int]

    def news(self) -> Iterator[tuple[int, list[int]]]:
        """The id and the new tokens of each request."""
        at = 0
        for request, count in zip(self.requests, self.counts, strict=True):
            yield request, self.tokens[at : at + count]
            at += count


class StepResult(NamedTuple):
    """The filter's result for a step, from :meth:`FilterProcess.take`. The other fields are as in ``Proposal``.

    Attributes:
        request: Id from :meth:`FilterProcess.open`.
        seconds: CPU seconds that the filter spent on the step.
    """

    request: int
    pairs: tuple[BlockPair, ...]
    counters: FilterCounters
    seconds: float
    across: tuple[AcrossPair, ...] = ()
    alternatives: tuple[tuple[BlockPair, ...], ...] = ()

    @property
    def num_pairs(self) -> int:
        """The number of block pairs, alternatives included."""
        return len(self.pairs) + len(self.across) + sum(map(len, self.alternatives))


#: For the steps that a feed finished: how many were shed (not compared), and the results of the others.
Reply = tuple[int, list[StepResult]]
