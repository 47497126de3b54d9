# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the filter, which runs in a process of its own."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from array import array
from pathlib import Path

from sglang_reasoncache import __version__
from sglang_reasoncache.filter.messages import LENGTH, Feed, Markers, Reply, Setup
from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
START_SECONDS = 180.0
#: Time polled without a reply to an outstanding feed, after which the process counts as hung.
SILENT_SECONDS = 30.0
#: Bytes of feeds that may wait to be sent.
_MAX_UNSENT = 8 << 20
# A pause between two polls counts as this much at most: the scheduler may have stood still.
_LONGEST_PAUSE = 1.0
_RECEIVE_BYTES = 1 << 18

_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop()); "
    "from sglang_reasoncache.filter.worker import main; main()"
)


class FilterProcess:
    """Takes the tokens of all requests and gives back block pairs; never holds up the scheduler.

    Every :meth:`feed` has one reply, with the steps that it finished. What is outstanding, taken
    and shed depends on the calls made, not on time, so tensor-parallel ranks agree.

    Args:
        markers: tokens that open and that close reasoning; None: all output counts.
        max_pending: steps compared and not taken, beyond which new ones are shed.

    Attributes:
        steps_shed: steps in taken replies that were not compared, because too many waited.
        restarts: times that it failed and was started anew.
        given_up: it failed too often, nothing is compared any more.

    Raises:
        RuntimeError: the process does not start.
    """

    def __init__(
        self,
        config: FilterConfig,
        vocabulary: Vocabulary,
        markers: Markers = None,
        max_pending: int = 256,
    ) -> None:
        self._setup = pickle.dumps(Setup(config, vocabulary.pieces, markers, max_pending))
        self.restarts = self.steps_shed = 0
        self.given_up = False
        self._next_request = 0
        self._reset()
        self._start()
        while not self._has_started and not self._failure:
            time.sleep(0.01)
            self.ready()
        if failure := self._failure:
            self.shut_down()
            raise RuntimeError(failure)

    def _reset(self) -> None:
        """There is no process; nothing is open, fed, taken or failed."""
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._has_started, self._failure = False, ""
        self._silent, self._polled = 0.0, time.monotonic()
        self._opened: list[tuple[int, int, bool]] = []
        self._joined: list[tuple[int, int]] = []
        self._closed: list[int] = []
        self._unsent, self._unread = bytearray(self._setup), bytearray()
        self._replies: collections.deque[Reply] = collections.deque()
        self._outstanding = self._steps_taken = 0

    def open(self, start_position: int, inside: bool) -> int:
        """Follow a new request from its first output token on; returns its id.

        ``inside``: its reasoning part is open at the start.
        """
        request = self._next_request
        self._next_request += 1
        self._opened.append((request, start_position, inside))
        return request

    def join(self, request: int, group: int) -> None:
        """An open request may be a source of the others in ``group`` and read theirs, from its next
        tokens on; -1: leaves its group."""
        self._joined.append((request, group))

    def close(self, request: int) -> None:
        """Forget a request. Results of its steps may still come."""
        self._closed.append(request)

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        """Take the next ``counts[i]`` tokens of each ``requests[i]``; arrays of type ``q``."""
        if self.given_up:
            return
        changes = self._opened, self._joined, self._closed
        feed = Feed(
            self._steps_taken, *changes, requests.tolist(), counts.tolist(), tokens.tolist()
        )
        self._unsent += pickle.dumps(tuple(feed))
        self._opened, self._joined, self._closed = [], [], []
        self._outstanding += 1
        self._exchange()

    def ready(self) -> int:
        """Replies that :meth:`take` could give now; -1 when it has failed.

        Ranks take the least of theirs, and all :meth:`restart` when that is -1.
        """
        if self.given_up:
            return 0
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
            num_shed, results = self._replies.popleft()
            limit -= 1
            num_pairs += sum(len(result.pairs) + len(result.across) for result in results)
            taken += results
            self.steps_shed += num_shed
            self._outstanding -= 1
        self._steps_taken += len(taken)
        return taken

    def restart(self) -> None:
        """Forget all requests and replies and start anew, or give up after too many times."""
        if self.given_up:
            return
        reason = self._failure or "it failed on another tensor-parallel rank"
        self._stop()
        if self.restarts < MAX_RESTARTS:
            self.restarts += 1
            logger.warning("reasoncache: the filter's process is started anew: %s", reason)
            return self._start()
        self.given_up = True
        logger.error(
            "reasoncache: the filter's process is given up, no further blocks are shared until "
            "the server is started again: %s",
            reason,
        )

    def shut_down(self) -> None:
        """End the process, and start none again."""
        self.given_up = True
        self._stop()

    @property
    def outstanding(self) -> int:
        """Feeds whose replies were not taken."""
        return self._outstanding

    @property
    def pid(self) -> int:
        """Of the process; 0 when there is none."""
        return 0 if self._child is None else self._child.pid

    def _start(self) -> None:
        # -P: no modules of the current folder; ours come last.
        package = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-P", "-c", _PROGRAM, package]
        # Small arrays gain nothing from more threads.
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._socket, theirs = socket.socketpair()
            self._socket.setblocking(False)
            with theirs:
                self._child = subprocess.Popen(command, stdin=theirs.fileno(), env=env)
        except OSError as error:
            self._failure = f"it cannot be started: {error}"

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=0.05)
        self._reset()

    def _exchange(self) -> None:
        """Send and receive what can be without waiting."""
        if self._failure or self._socket is None:
            return
        try:
            with contextlib.suppress(BlockingIOError):
                if self._unsent:
                    del self._unsent[: self._socket.send(self._unsent)]
            if len(self._unsent) > len(self._setup) + _MAX_UNSENT:
                self._failure = f"it left {len(self._unsent)} bytes unread"
            with contextlib.suppress(BlockingIOError):
                while received := self._socket.recv(_RECEIVE_BYTES):
                    self._silent = 0.0
                    self._unread += received
                    self._read()
                raise OSError("it closed its end")
        except OSError as error:
            code = self._child and self._child.poll()
            self._failure = self._failure or f"{error}, exit code {code}"
        except Exception as error:
            # Unpickling may raise anything.
            self._failure = f"it answered nonsense: {error!r}"

    def _read(self) -> None:
        """Take the complete messages out of what has arrived."""
        while len(self._unread) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._unread)[0]
            if len(self._unread) < end:
                return
            message = pickle.loads(self._unread[LENGTH.size : end])
            del self._unread[:end]
            if self._has_started:
                self._replies.append(message)
            elif message == __version__:
                self._has_started = True
            else:
                self._failure = (
                    f"it is sglang-reasoncache {message}, this server is {__version__}: the package "
                    "was exchanged while the server ran"
                )

    def _watch(self) -> None:
        """Count the time that is polled in vain."""
        now = time.monotonic()
        waited, self._polled = min(now - self._polled, _LONGEST_PAUSE), now
        is_awaited = not self._has_started or self._outstanding > len(self._replies)
        self._silent = self._silent + waited if is_awaited else 0.0
        if self._silent > (SILENT_SECONDS if self._has_started else START_SECONDS):
            self._failure = self._failure or f"no reply for {self._silent:.0f} seconds"
