# SPDX-License-Identifier: Apache-2.0
"""What the scheduler asks of the step filter: tokens of all requests in, block pairs out."""

from __future__ import annotations

from array import array
from typing import Protocol

from sglang_reasoncache.filter.proposal import StepResult


class StepEngine(Protocol):
    """Called by the scheduler's thread only, which it never holds up. Arrays have type ``q``.

    Every :meth:`feed` has one reply, with the steps that it finished.

    Attributes:
        outstanding: feeds whose replies were not taken. A function of the calls made, not of
            time, so tensor-parallel ranks agree on it.
        steps_shed: steps in taken replies that were not compared, because too many waited.
        restarts: times that it failed and was started anew.
        given_up: it failed too often, nothing is compared any more.
    """

    steps_shed: int
    restarts: int
    given_up: bool

    @property
    def outstanding(self) -> int: ...

    def open(self, start_position: int, inside: bool) -> int:
        """Follow a new request from its first output token on; returns its id.

        ``inside``: its reasoning part is open at the start.
        """

    def close(self, request: int) -> None:
        """Forget a request. Results of its steps may still come."""

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        """Take the next ``counts[i]`` tokens of each ``requests[i]``, all in ``tokens``."""

    def ready(self) -> int:
        """Replies that :meth:`take` could give now; -1 when it has failed.

        Ranks take the least of theirs, and all :meth:`restart` when that is -1.
        """

    def restart(self) -> None:
        """Forget all requests and replies and start anew, or give up after too many times."""

    def take(self, limit: int, max_pairs: int) -> list[StepResult]:
        """Results of up to ``limit`` replies, in the order in which the steps ended.

        Stops behind the reply with which they have ``max_pairs`` pairs or more.
        """
