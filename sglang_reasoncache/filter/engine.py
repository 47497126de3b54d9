# SPDX-License-Identifier: Apache-2.0
"""Stage 1 for all requests of a scheduler: tokens in, block pairs out.

The scheduler's thread feeds and takes; whatever compares steps in between must
not hold it up. ``native.engine.NativeEngine`` does it on a thread of its own;
:class:`InlineEngine`, without a compiler and for ablations, in the caller's.
"""

from __future__ import annotations

import collections
import time
from array import array
from collections.abc import Callable
from typing import Protocol

from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.request_filter import RequestFilter


class StepEngine(Protocol):
    """Called by one thread. Arrays have type ``q``."""

    @property
    def name(self) -> str:
        """For reports."""

    @property
    def outstanding(self) -> int:
        """Steps handed over and not taken yet. A function of the calls made, not of
        time, so tensor-parallel ranks agree on it."""

    @property
    def steps_shed(self) -> int:
        """Finished steps not looked at, because too many were outstanding."""

    def open(self, start_position: int, inside: bool) -> int:
        """Follow a new request from its first output token on; returns its id.

        ``inside``: its reasoning part is open at the start.
        """

    def close(self, request: int) -> None:
        """Forget a request. Results of its steps may still come."""

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        """Take the next ``counts[i]`` tokens of each ``requests[i]``, all in ``tokens``."""

    def ready(self) -> int:
        """Results that :meth:`take` would give now."""

    def take(self, limit: int, max_pairs: int) -> list[StepResult]:
        """Up to ``limit`` results, in the order in which their steps ended.

        Stops behind the result with which they have ``max_pairs`` pairs or more.
        """


class InlineEngine:
    """The Python filter, in the caller's thread; see :class:`StepEngine`.

    Args:
        make_filter: a filter from (start position, inside reasoning).
    """

    name = "python"
    steps_shed = 0

    def __init__(self, make_filter: Callable[[int, bool], RequestFilter]) -> None:
        self._make_filter = make_filter
        self._filters: dict[int, RequestFilter] = {}
        self._results: collections.deque[StepResult] = collections.deque()
        self._next_request = 0

    @property
    def outstanding(self) -> int:
        return len(self._results)

    def open(self, start_position: int, inside: bool) -> int:
        request = self._next_request
        self._next_request += 1
        self._filters[request] = self._make_filter(start_position, inside)
        return request

    def close(self, request: int) -> None:
        self._filters.pop(request, None)

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        at = 0
        for request, count in zip(requests, counts, strict=True):
            new = tokens[at : at + count]
            at += count
            step_filter = self._filters.get(request)
            if step_filter is None:
                continue
            start = time.thread_time()
            for proposal in step_filter.push(new):
                now = time.thread_time()
                step = proposal.step
                self._results.append(
                    StepResult(
                        request,
                        step.start,
                        step.end,
                        proposal.pairs,
                        proposal.counters,
                        now - start,
                    )
                )
                start = now

    def ready(self) -> int:
        return len(self._results)

    def take(self, limit: int, max_pairs: int) -> list[StepResult]:
        taken: list[StepResult] = []
        num_pairs = 0
        while self._results and len(taken) < limit and num_pairs < max_pairs:
            taken.append(self._results.popleft())
            num_pairs += len(taken[-1].pairs)
        return taken
