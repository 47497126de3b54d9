# SPDX-License-Identifier: Apache-2.0
"""The program of the filter process. :mod:`sglang_reasoncache.filter.process` starts it with a socket as
standard input."""

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import time
import traceback
import weakref

from sglang_reasoncache import __version__
from sglang_reasoncache.filter.messages import LENGTH, Feed, Reply, Setup, StepResult
from sglang_reasoncache.filter.request_filter import RequestFilter
from sglang_reasoncache.filter.runs import RunGroup
from sglang_reasoncache.filter.segment import ReasoningSpan, TokenClasses
from sglang_reasoncache.filter.structure import signature
from sglang_reasoncache.filter.vocabulary import Vocabulary

_PR_SET_PDEATHSIG = 1


class Worker:
    """Holds a filter for each open request, and answers each :class:`Feed` of the scheduler."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        if setup.config.match == "steps" and setup.config.use_structure:
            # Imports SymPy now, so that no step waits for the import.
            signature("")
        self._vocabulary = Vocabulary(setup.pieces)
        self._classes = TokenClasses(self._vocabulary)
        self._filters: dict[int, RequestFilter] = {}
        # A group (requests with the same prompt) exists as long as it has members.
        self._groups: weakref.WeakValueDictionary[int, RunGroup] = weakref.WeakValueDictionary()
        self._num_compared = 0

    def answer(self, feed: Feed) -> Reply:
        """Process a feed. Requests that are not open are ignored."""
        for request, start, inside, prompt in feed.opened:
            span = None
            if self._setup.markers is not None:
                start_ids, end_ids = self._setup.markers
                span = ReasoningSpan(start_ids, end_ids, inside)
            self._filters[request] = RequestFilter(
                self._setup.config, self._classes, self._vocabulary, start, span, prompt
            )
        for request, number in feed.joined:
            if request in self._filters:
                group = None if number < 0 else self._groups.setdefault(number, RunGroup())
                self._filters[request].join(request, group)
        for request in feed.closed:
            self._forget(request)
        results: list[StepResult] = []
        num_shed = 0
        for request, tokens in feed.news():
            if request not in self._filters:
                continue
            began = time.thread_time()
            try:
                for step in self._filters[request].steps(tokens):
                    # Counts, not time, decide which steps are shed (not compared), so all ranks shed the same.
                    if self._num_compared - feed.steps_taken >= self._setup.max_pending:
                        num_shed += 1
                        continue
                    proposal = self._filters[request].propose(step)
                    self._num_compared += 1
                    now = time.thread_time()
                    results.append(
                        StepResult(
                            request=request,
                            pairs=proposal.pairs,
                            counters=proposal.counters,
                            seconds=now - began,
                            across=proposal.across,
                            alternatives=proposal.alternatives,
                        )
                    )
                    began = now
            except (MemoryError, OSError, ImportError):
                # Other ranks may have enough memory or files, so this process ends. All ranks then restart the
                # filter.
                raise
            except Exception:
                # All ranks get the same exception, so only this request stops sharing.
                traceback.print_exc()
                self._forget(request)
        return num_shed, results

    def _forget(self, request: int) -> None:
        forgotten = self._filters.pop(request, None)
        if forgotten is not None:
            forgotten.join(request, None)


def _end_with_the_parent() -> None:
    """Have Linux kill this process when the parent ends. Elsewhere the closed socket ends this process."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C in a terminal reaches all processes, but only the server decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stand_back() -> None:
    """Lower this process's priority, so that it does not take the scheduler's core whenever new tokens arrive
    (every fourth decode step). If a sandbox forbids this, the priority stays."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(10)


def main() -> None:
    """Answer feeds until the parent closes its end of the socket."""
    _end_with_the_parent()
    _stand_back()
    scheduler = socket.socket(fileno=0)

    def say(message: object) -> None:
        pickled = pickle.dumps(message)
        scheduler.sendall(LENGTH.pack(len(pickled)) + pickled)

    with (
        contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError),
        scheduler.makefile("rb") as stream,
    ):
        # Send the version first: if it is not the server's, this process may not understand the setup.
        say(__version__)
        worker = Worker(pickle.load(stream))
        gc.freeze()
        while True:
            say(worker.answer(Feed(*pickle.load(stream))))
