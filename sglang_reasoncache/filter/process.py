# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the step filter, which runs in a process of its own."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import select
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from sglang_reasoncache.filter.encoder import Vector
from sglang_reasoncache.filter.messages import REPLY_HEADER, WORD, Feed, unpack_results
from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

#: When set to 1, polls wait for the filter, so that tests share at the same tokens in every run.
WAIT_ENV = "REASONCACHE_WAIT_FOR_FILTER"
MAX_RESTARTS = 3
START_SECONDS = 180.0
#: Time polled without a reply to an outstanding feed, after which the process counts as hung.
SILENT_SECONDS = 30.0
_MAX_UNSENT = 8 << 20
# A pause between two polls counts as this much at most: the scheduler may have stood still.
_LONGEST_PAUSE = 1.0
_MAX_REPLY_WORDS = 1 << 24
_RECEIVE_BYTES = 1 << 18

_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from sglang_reasoncache.filter.worker import main; main()"
)


class FilterProcess:
    """What the scheduler's thread, never held up, asks of the step filter: tokens of all requests
    in, block pairs out. Every :meth:`feed` has one reply, with the steps that it finished.

    Args:
        markers: tokens that open and that close reasoning; None: all output counts.
        max_pending: steps compared and not taken, beyond which new ones are shed.
        sentence_model: of the encoder ``sentence-bert``.
        embedding: of the encoder ``embedding``, float32 [vocabulary, dim]; not kept here.

    Attributes:
        steps_shed: steps in taken replies that were not compared, because too many waited.
        restarts: times that it failed and was started anew.
        given_up: it failed too often, nothing is compared any more.

    Raises:
        ValueError: the sentence model cannot be loaded.
        RuntimeError: the process does not start.
    """

    def __init__(
        self,
        config: FilterConfig,
        vocabulary: Vocabulary,
        markers: tuple[Iterable[int], Iterable[int]] | None = None,
        max_pending: int = 256,
        sentence_model: str = "",
        embedding: Vector | None = None,
    ) -> None:
        setup = {
            "config": asdict(config),
            "markers": [sorted(ids) for ids in markers or ()],
            "max_pending": max_pending,
            "sentence_model": sentence_model,
            "pieces": [piece.decode("latin-1") for piece in vocabulary.pieces],
        }
        # In memory, and inherited by every process that is started.
        self._files = [os.memfd_create("reasoncache-filter")]
        with open(self._files[0], "w", encoding="utf-8", closefd=False) as file:
            json.dump(setup, file)
        if embedding is not None:
            self._files.append(os.memfd_create("reasoncache-embedding"))
            with open(self._files[1], "wb", closefd=False) as matrix:
                np.save(matrix, embedding)
        self.restarts = self.steps_shed = 0
        self.given_up = False
        self._waits = os.environ.get(WAIT_ENV) == "1"
        self._next_request = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._reset()
        self._start()
        self._wait_for(0)
        if self._failure:
            self.shut_down()
            raise self._failure

    def _reset(self) -> None:
        """Nothing is open, fed, taken or failed."""
        self._opened, self._joined, self._closed = array("q"), array("q"), array("q")
        self._unsent, self._unread = bytearray(), bytearray()
        self._replies: collections.deque[tuple[int, list[StepResult]]] = collections.deque()
        self._num_fed = self._num_taken = self._steps_taken = 0
        # Of the reply to come; 0 says that the process has started.
        self._next_reply = 0
        self._silent, self._polled = 0.0, time.monotonic()
        self._failure: Exception | None = None

    @property
    def outstanding(self) -> int:
        """Feeds whose replies were not taken. A function of the calls made, not of time, so
        tensor-parallel ranks agree on it."""
        return self._num_fed - self._num_taken

    def open(self, start_position: int, inside: bool) -> int:
        """Follow a new request from its first output token on; returns its id.

        ``inside``: its reasoning part is open at the start.
        """
        request = self._next_request
        self._next_request += 1
        self._opened.extend((request, start_position, inside))
        return request

    def join(self, request: int, group: int) -> None:
        """An open request may be a source of the others in ``group`` and read theirs, from its next
        tokens on; -1: leaves its group."""
        self._joined.extend((request, group))

    def close(self, request: int) -> None:
        """Forget a request. Results of its steps may still come."""
        self._closed.append(request)

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        """Take the next ``counts[i]`` tokens of each ``requests[i]``; arrays of type ``q``."""
        if self.given_up:
            return
        changes = self._opened, self._joined, self._closed
        feed = Feed(self._steps_taken, *changes, requests, counts, tokens)
        self._opened, self._joined, self._closed = array("q"), array("q"), array("q")
        self._num_fed += 1
        self._unsent += feed.pack()
        self._exchange()

    def ready(self) -> int:
        """Replies that :meth:`take` could give now; -1 when it has failed.

        Ranks take the least of theirs, and all :meth:`restart` when that is -1.
        """
        if self.given_up:
            return 0
        if self._waits:
            self.wait()
        self._exchange()
        self._watch()
        return -1 if self._failure else len(self._replies)

    def take(self, limit: int, max_pairs: int) -> list[StepResult]:
        """Results of up to ``limit`` replies, in the order in which the steps ended.

        Stops behind the reply with which they have ``max_pairs`` pairs or more.
        """
        taken: list[StepResult] = []
        num_pairs = 0
        while limit > 0 and self._replies and num_pairs < max_pairs:
            shed, results = self._replies.popleft()
            limit -= 1
            num_pairs += sum(len(result.pairs) + len(result.across) for result in results)
            taken += results
            self.steps_shed += shed
            self._num_taken += 1
        self._steps_taken += len(taken)
        return taken

    def restart(self) -> None:
        """Forget all requests and replies and start anew, or give up after too many times."""
        if self.given_up:
            return
        reason = self._failure or "it failed on another tensor-parallel rank"
        self._stop()
        self._reset()
        if self.restarts == MAX_RESTARTS:
            self.given_up = True
            logger.error(
                "reasoncache: the step filter's process is given up, no further blocks are shared "
                "until the server is started again: %s",
                reason,
            )
            return
        self.restarts += 1
        logger.warning("reasoncache: the step filter's process is started anew: %s", reason)
        self._start()

    def wait(self) -> None:
        """Block until every feed has its reply, or the process has failed."""
        self._wait_for(self._num_fed)

    def shut_down(self) -> None:
        """End the process, and start none again."""
        self.given_up = True
        self._stop()
        while self._files:
            os.close(self._files.pop())

    @property
    def pid(self) -> int:
        """Of the process; 0 when there is none."""
        return 0 if self._child is None else self._child.pid

    def _start(self) -> None:
        # The current folder's modules are nobody's business, and ours come last.
        package = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-P", "-c", _PROGRAM, package, *map(str, self._files)]
        # Small arrays gain nothing from more threads.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._socket, theirs = socket.socketpair()
            self._socket.setblocking(False)
            with theirs:
                self._child = subprocess.Popen(
                    command, stdin=theirs.fileno(), pass_fds=self._files, env=env
                )
        except OSError as error:
            self._fail(f"it cannot be started: {error}")

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=0.05)
        self._socket = self._child = None

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or RuntimeError(reason)

    def _exchange(self) -> None:
        """Send and receive what can be without waiting."""
        if self._failure or self._socket is None:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                if self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
            if len(self._unsent) > _MAX_UNSENT:
                self._fail(f"it left {len(self._unsent)} bytes unread")
            with contextlib.suppress(BlockingIOError):
                while received := self._socket.recv(_RECEIVE_BYTES):
                    self._silent = 0.0
                    self._unread += received
                    self._read()
                raise OSError("it closed its end")
        except OSError as error:
            self._fail(f"{error}, exit code {self._child and self._child.poll()}")
        except ValueError as error:
            self._fail(f"it answered nonsense: {error}")

    def _watch(self) -> None:
        """Count the time that is polled in vain."""
        now = time.monotonic()
        waited, self._polled = min(now - self._polled, _LONGEST_PAUSE), now
        self._silent = self._silent + waited if self._next_reply <= self._num_fed else 0.0
        if self._silent > (SILENT_SECONDS if self._next_reply else START_SECONDS):
            self._fail(f"no reply for {self._silent:.0f} seconds")

    def _wait_for(self, reply: int) -> None:
        while self._next_reply <= reply and not self._failure:
            assert self._socket is not None, "it has not failed"
            # Not select(): a scheduler may have more than 1,024 files open.
            events = select.poll()
            events.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            events.poll(1000 * _LONGEST_PAUSE)
            self._exchange()
            self._watch()

    def _read(self) -> None:
        """Take the complete replies out of what has arrived; ValueError for one that cannot be."""
        while len(self._unread) >= REPLY_HEADER * WORD:
            length, number, shed, num_steps = array("q", bytes(self._unread[: REPLY_HEADER * WORD]))
            if not REPLY_HEADER <= length <= _MAX_REPLY_WORDS or number != self._next_reply:
                raise ValueError(f"{length} words for reply {number}, not {self._next_reply}")
            if len(self._unread) < length * WORD:
                return
            body = bytes(self._unread[REPLY_HEADER * WORD : length * WORD])
            del self._unread[: length * WORD]
            self._next_reply += 1
            if shed < 0:
                self._failure = ValueError(body[:num_steps].decode(errors="replace"))
                return
            if number > self._num_fed:
                raise ValueError(f"reply {number} to {self._num_fed} feeds")
            if number:
                self._replies.append((shed, unpack_results(array("q", body), num_steps)))
