# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and the filter's process say to each other: pickles over a socket.

The process first says its package's version. The scheduler sends a :class:`Setup`, then
:class:`Feed` after feed, as plain tuples, which take the least time; each has one reply, in order.
What the process says comes behind its length (:data:`LENGTH`), so that the scheduler reads complete
messages only. Both ends are ours, and what requests add are numbers, so unpickling is safe.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.settings import FilterConfig

LENGTH = struct.Struct("!I")

#: Of the steps that a feed finished, how many were shed, and what was found for the others.
Reply = tuple[int, list[StepResult]]

#: Tokens that open and that close reasoning; None: all output counts.
Markers = tuple[frozenset[int], frozenset[int]] | None


class Setup(NamedTuple):
    """See :class:`FilterProcess`; ``pieces`` are the vocabulary's."""

    config: FilterConfig
    pieces: tuple[bytes, ...]
    markers: Markers
    max_pending: int


class Feed(NamedTuple):
    """New tokens, and what happened since the last feed.

    Attributes:
        steps_taken: results that the scheduler has taken so far.
        opened: new requests: id, position of the first token to come, whether reasoning is open.
        joined: requests that joined a group: id, group; -1: left theirs.
        closed: ids of requests to forget.
        requests: ids of the requests with new tokens.
        counts: new tokens of each.
        tokens: all new tokens, in the order of ``requests``.
    """

    steps_taken: int
    opened: list[tuple[int, int, bool]]
    joined: list[tuple[int, int]]
    closed: list[int]
    requests: list[int]
    counts: list[int]
    tokens: list[int]

    def news(self) -> Iterator[tuple[int, list[int]]]:
        """Each request with its new tokens."""
        at = 0
        for request, count in zip(self.requests, self.counts, strict=True):
            yield request, self.tokens[at : at + count]
            at += count
