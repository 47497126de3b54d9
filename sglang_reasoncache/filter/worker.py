# SPDX-License-Identifier: Apache-2.0
"""Compares steps in a process of its own.

:mod:`sglang_reasoncache.filter.process` starts it, with a socket as standard input and the
setup in an inherited file.
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
import traceback
import weakref
from array import array

import numpy as np

from sglang_reasoncache.filter.encoder import EmbeddingEncoder, SentenceEncoder, StepEncoder
from sglang_reasoncache.filter.messages import WORD, Feed, pack_refusal, pack_reply
from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.runs import RunGroup
from sglang_reasoncache.filter.segment import ReasoningSpan, TokenClasses
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.structure import Limits
from sglang_reasoncache.filter.structure.signature import signature
from sglang_reasoncache.filter.vocabulary import Vocabulary

_PR_SET_PDEATHSIG = 1


class Worker:
    """Answers feeds.

    Args:
        setup: file that :mod:`filter.process` wrote.
        matrix: file of the encoder ``embedding``; empty without.

    Raises:
        ValueError: a sentence model that cannot be loaded.
    """

    def __init__(self, setup: str, matrix: str = "") -> None:
        with open(setup, encoding="utf-8") as file:
            told = json.load(file)
        limits = Limits(**told["config"].pop("limits"))
        self._config = FilterConfig(**told["config"], limits=limits)
        if self._config.match == "steps" and self._config.use_structure:
            # Imports SymPy: better now than while a step waits.
            signature("")
        self._vocabulary = Vocabulary([piece.encode("latin-1") for piece in told["pieces"]])
        self._classes = TokenClasses(self._vocabulary)
        # Tokens that open and that close reasoning; none where all output counts.
        self._markers = [frozenset[int](ids) for ids in told["markers"]]
        self._max_pending = told["max_pending"]
        self._encoder: StepEncoder | None = None
        if told["sentence_model"]:
            self._encoder = SentenceEncoder(told["sentence_model"], limits.max_chars)
        elif matrix:
            # Read where it lies: it may take gigabytes.
            self._encoder = EmbeddingEncoder(np.load(matrix, mmap_mode="r"))
        self._filters: dict[int, RequestFilter] = {}
        # As long as they have members.
        self._groups: weakref.WeakValueDictionary[int, RunGroup] = weakref.WeakValueDictionary()
        self._num_compared = 0

    def answer(self, feed: Feed, number: int) -> bytes:
        """The reply to a feed. Ids that are not open are passed over."""
        for request, start, inside in zip(*(feed.opened[i::3] for i in range(3)), strict=True):
            markers = self._markers
            span = ReasoningSpan(markers[0], markers[1], bool(inside)) if markers else None
            self._filters[request] = RequestFilter(
                self._config, self._classes, self._vocabulary, start, span, self._encoder
            )
        for request, joined in zip(feed.joined[::2], feed.joined[1::2], strict=True):
            if request in self._filters:
                group = None if joined < 0 else self._groups.setdefault(joined, RunGroup())
                self._filters[request].join(request, group)
        for request in feed.closed:
            self._forget(request)
        results: list[StepResult] = []
        num_shed = 0
        for request, tokens in feed.news():
            step_filter = self._filters.get(request)
            if step_filter is None:
                continue
            began = time.thread_time()
            try:
                for step in step_filter.steps(tokens):
                    if self._num_compared - feed.steps_taken >= self._max_pending:
                        num_shed += 1
                        continue
                    _, pairs, counters, across = step_filter.propose(step)
                    self._num_compared += 1
                    now = time.thread_time()
                    seconds, began = now - began, now
                    of_step = request, step.start, step.end
                    results.append(StepResult(*of_step, pairs, counters, seconds, across))
            except MemoryError:
                # The other ranks may have had enough: all of them start anew.
                raise
            except Exception:
                # The same on all ranks. This request shares nothing more, the others go on.
                traceback.print_exc()
                self._forget(request)
        return pack_reply(number, num_shed, results)

    def _forget(self, request: int) -> None:
        step_filter = self._filters.pop(request, None)
        if step_filter is not None:
            step_filter.join(request, None)


def _send(message: bytes) -> None:
    while message:
        message = message[os.write(0, message) :]


def main() -> None:
    """Answer until the parent closes its end."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        _answer()


def _stand_back() -> None:
    """Woken by every poll, it must not take the scheduler's core. A sandbox may forbid either."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(10)


def _answer() -> None:
    # Where the kernel can; else the socket's end says that the parent is gone.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _stand_back()
    # A terminal sends it to the whole group; the server decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        worker = Worker(*(f"/proc/self/fd/{number}" for number in sys.argv[1:]))
    except ValueError as error:
        return _send(pack_refusal(str(error)))
    _send(pack_reply(0, 0, []))
    gc.freeze()
    for number in itertools.count(1):
        head = sys.stdin.buffer.read(WORD)
        if len(head) < WORD:
            return None
        rest = int.from_bytes(head, sys.byteorder) * WORD - WORD
        feed = Feed.unpack(array("q", head + sys.stdin.buffer.read(rest)))
        _send(worker.answer(feed, number))
