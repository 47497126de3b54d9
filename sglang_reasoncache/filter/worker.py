# SPDX-License-Identifier: Apache-2.0
"""``python -m sglang_reasoncache.filter.worker``: compares steps in a process of its own.

:mod:`sglang_reasoncache.filter.process` starts it, with a socket as standard input and the
setup in an inherited file. Messages are arrays of int64, their length in words first:

    feed:  length, steps taken, opened, closed, requests,
           (id, start position, inside) of each opened, ids of the closed,
           ids, counts of new tokens, tokens
    reply: length, number of the reply, steps shed, steps,
           (id, start, end, CPU ns, pairs, counters...) of each step,
           (dst_start, src_start) of each pair

Reply 0 says that it has started, or, with -1 steps shed, why not: a text of that many bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from sglang_reasoncache.filter.encoder import EmbeddingEncoder, SentenceEncoder, StepEncoder
from sglang_reasoncache.filter.proposal import FilterCounters
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.segment import TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.span import ReasoningSpan
from sglang_reasoncache.filter.structure.tree import Limits
from sglang_reasoncache.filter.vocabulary import Vocabulary

WORD = 8
FEED_HEADER = 5
REPLY_HEADER = 4
STEP_HEADER = 5 + len(fields(FilterCounters))
_COUNTERS = attrgetter(*(field.name for field in fields(FilterCounters)))

_PR_SET_PDEATHSIG = 1


class Worker:
    """Answers feeds.

    Args:
        setup: what :mod:`filter.process` wrote.
        encoder: replaces counts of tokens in an ablation.

    Raises:
        ValueError: a sentence model that cannot be loaded.
    """

    def __init__(self, setup: Mapping[str, Any], encoder: StepEncoder | None) -> None:
        told = json.loads(setup["settings"].tobytes())
        blob = setup["blob"].tobytes()
        ends = itertools.accumulate(setup["lengths"].tolist(), initial=0)
        limits = Limits(**told["config"].pop("limits"))
        self._config = FilterConfig(**told["config"], limits=limits)
        self._vocabulary = Vocabulary([blob[a:b] for a, b in itertools.pairwise(ends)])
        self._classes = TokenClasses(self._vocabulary)
        # Tokens that open and that close reasoning; none where all output counts.
        self._markers = [frozenset[int](ids) for ids in told["markers"]]
        self._max_pending = told["max_pending"]
        if told["sentence_model"]:
            encoder = SentenceEncoder(told["sentence_model"], limits.max_chars)
        self._encoder = encoder
        self._filters: dict[int, RequestFilter] = {}
        self._num_compared = 0

    def answer(self, feed: array[int], number: int) -> array[int]:
        """The reply to a feed. Ids that are not open are passed over."""
        _, taken, num_opened, num_closed, num_requests = feed[:FEED_HEADER]
        at = FEED_HEADER
        for _ in range(num_opened):
            request, start, inside = feed[at : at + 3]
            self._filters[request] = self._filter(start, bool(inside))
            at += 3
        for request in feed[at : at + num_closed]:
            self._filters.pop(request, None)
        at += num_closed
        tokens_at = at + 2 * num_requests
        steps, pairs, num_shed = array("q"), array("q"), 0
        for i in range(at, at + num_requests):
            request, count = feed[i], feed[i + num_requests]
            tokens = feed[tokens_at : tokens_at + count]
            tokens_at += count
            step_filter = self._filters.get(request)
            if step_filter is None:
                continue
            start_ns = time.thread_time_ns()
            for step in step_filter.steps(tokens):
                if self._num_compared - taken >= self._max_pending:
                    num_shed += 1
                    continue
                self._num_compared += 1
                found = step_filter.propose(step)
                now = time.thread_time_ns()
                steps.extend((request, step.start, step.end, now - start_ns, len(found.pairs)))
                steps.extend(_COUNTERS(found.counters))
                for pair in found.pairs:
                    pairs.extend(pair[:2])
                start_ns = now
        num_steps = len(steps) // STEP_HEADER
        length = REPLY_HEADER + len(steps) + len(pairs)
        return array("q", (length, number, num_shed, num_steps)) + steps + pairs

    def _filter(self, start_position: int, inside: bool) -> RequestFilter:
        span = None
        if self._markers:
            start_ids, end_ids = self._markers
            span = ReasoningSpan(start_ids, end_ids, inside)
        return RequestFilter(
            self._config, self._classes, self._vocabulary, start_position, span, self._encoder
        )


def _started(setup: str, matrix: str = "") -> Worker:
    # Read where it lies: the matrix may take gigabytes.
    encoder = EmbeddingEncoder(np.load(matrix, mmap_mode="r")) if matrix else None
    with np.load(setup, allow_pickle=False) as told:
        return Worker(told, encoder)


def _send(message: bytes) -> None:
    while message:
        message = message[os.write(0, message) :]


def main() -> None:
    """Answer until the parent closes its end."""
    # Where the kernel can; else the socket's end says that the parent is gone.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A terminal sends it to the whole group; the server decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = _started(*(f"/proc/self/fd/{number}" for number in sys.argv[1:]))
    except ValueError as error:
        text = str(error).encode()
        padded = text + bytes(-len(text) % WORD)
        _send(array("q", (REPLY_HEADER + len(padded) // WORD, 0, -1, len(text))).tobytes() + padded)
        return
    _send(array("q", (REPLY_HEADER, 0, 0, 0)).tobytes())
    gc.freeze()
    for number in itertools.count(1):
        head = sys.stdin.buffer.read(WORD)
        if len(head) < WORD:
            return
        rest = int.from_bytes(head, sys.byteorder) * WORD - WORD
        _send(worker.answer(array("q", head + sys.stdin.buffer.read(rest)), number).tobytes())


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
