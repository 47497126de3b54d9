# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the filter: starts the filter process, feeds it and takes its results."""

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
from sglang_reasoncache.filter.messages import LENGTH, Feed, Markers, Reply, Setup, StepResult
from sglang_reasoncache.filter.settings import FilterConfig
from sglang_reasoncache.filter.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
#: After so many replies of one process a restart does not count towards ``MAX_RESTARTS`` any more. Each poll of
#: running requests, every fourth decode step, gets one reply at most.
FORGIVEN_AFTER = 1 << 14
START_SECONDS = 180.0
#: The process counts as hung if a feed is outstanding and this many seconds of polling bring no reply.
SILENT_SECONDS = 30.0
#: Bytes of feeds that may wait to be sent. If more bytes wait, the process counts as failed.
_MAX_UNSENT = 8 << 20
# Of the time between two polls, at most this many seconds count as silence: the scheduler may have paused.
_LONGEST_PAUSE = 1.0
_RECEIVE_BYTES = 1 << 18
#: Tokens of prompts in the feeds that are not answered yet. Prompts beyond that are not sent, on any rank, and
#: their blocks are not read. The process takes a second for a million of them.
_MOST_OF_PROMPTS = 1 << 17
_NO_TOKENS = array("q")

_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop()); "
    "from sglang_reasoncache.filter.worker import main; main()"
)


class FilterProcess:
    """Sends the tokens of all requests to the filter process and returns block pairs. The scheduler
    never waits for results.

    Every :meth:`feed` gets one reply, about the steps that the feed finished. On all tensor-parallel ranks the
    same replies are outstanding and the same steps are shed, as this depends on the calls made, not on time.

    Args:
        markers: Tokens that open reasoning, and tokens that close it. None if all output is reasoning.
        max_pending: While results of this many steps wait for :meth:`take`, new steps are shed (not compared).

    Attributes:
        outstanding: Number of feeds whose replies were not taken yet.
        steps_shed: Number of shed steps in the replies that were taken.
        restarts: How often the process failed and was restarted.
        given_up: Whether no steps are compared any more, as the process failed too often or was shut down. The
            same on all ranks: they restart together, and taken replies, not time, make up for a restart.

    Raises:
        RuntimeError: The process does not start.
    """

    def __init__(
        self,
        config: FilterConfig,
        vocabulary: Vocabulary,
        markers: Markers = None,
        max_pending: int = 256,
    ) -> None:
        self._setup = pickle.dumps(Setup(config, vocabulary.pieces, markers, max_pending))
        self.restarts = 0
        # Those restarts that replies have not made up for.
        self._unforgiven = 0
        self.steps_shed = 0
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
        """Reset all that belongs to one filter process: socket, requests, feeds, replies and failure."""
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._has_started = False
        self._failure = ""
        # Seconds of silence while a reply is awaited, and when these were last counted.
        self._silent = 0.0
        self._polled = time.monotonic()
        # What the next feed says first: new requests and last calls of :meth:`join`, both by request, and
        # requests to forget.
        self._opened: dict[int, tuple[int, int, bool, array[int]]] = {}
        self._joined: dict[int, int] = {}
        self._closed: list[int] = []
        self._unsent = bytearray(self._setup)
        self._unread = bytearray()
        self._replies: collections.deque[Reply] = collections.deque()
        # Tokens of prompts in each feed whose reply was not taken, in the next feed, and in all of these. As on
        # all other ranks.
        self._of_prompts: collections.deque[int] = collections.deque()
        self._of_next = 0
        self._of_all = 0
        # How many results of the oldest reply were taken.
        self._taken_of_reply = 0
        self.outstanding = 0
        self._steps_taken = 0
        # Replies taken since the process was started, or since they made up for a restart.
        self._replies_taken = 0

    def open(self, start_position: int, inside: bool, prompt: array[int] = _NO_TOKENS) -> int:
        """Follow a new request. Returns its id for the other methods.

        ``start_position``: position of the first output token. ``inside``: whether the output begins in
        reasoning. ``prompt``: the prompt's tokens if blocks of the output may read them. Typecode ``q``.
        """
        if len(prompt) > _MOST_OF_PROMPTS - self._of_all:
            prompt = _NO_TOKENS
        request = self._next_request
        self._next_request += 1
        self._opened[request] = request, start_position, inside, prompt
        self._of_next += len(prompt)
        self._of_all += len(prompt)
        return request

    def join(self, request: int, group: int) -> None:
        """Make an open request a member of ``group`` (requests with the same prompt). From the next feed on,
        members may read each other's blocks. If ``group`` is -1, the request leaves its group."""
        self._joined[request] = group

    def close(self, request: int, on_all: bool = True) -> None:
        """Forget a request. :meth:`take` may still return results of its steps. The process is not told of a
        request that no feed has opened.

        ``on_all``: whether all ranks close it now, between the same feeds. If not, its prompt counts until the
        next feed, so that all ranks send the same prompts."""
        self._joined.pop(request, None)
        opened = self._opened.pop(request, None)
        if opened is None:
            self._closed.append(request)
        elif on_all:
            prompt = opened[3]
            self._of_next -= len(prompt)
            self._of_all -= len(prompt)

    def feed(self, requests: array[int], counts: array[int], tokens: array[int]) -> None:
        """Send the next ``counts[i]`` tokens of each ``requests[i]``. The arrays have typecode ``q``."""
        if self.given_up:
            return
        feed = Feed(
            steps_taken=self._steps_taken,
            opened=list(self._opened.values()),
            joined=list(self._joined.items()),
            closed=self._closed,
            requests=requests.tolist(),
            counts=counts.tolist(),
            tokens=tokens.tolist(),
        )
        self._unsent += pickle.dumps(tuple(feed))
        self._of_prompts.append(self._of_next)
        self._of_next = 0
        self._opened = {}
        self._joined = {}
        self._closed = []
        self.outstanding += 1
        self._exchange()

    def ready(self) -> int:
        """Number of replies that :meth:`take` can return now. -1 if the process has failed.

        The caller uses the smallest number over all ranks. If it is -1, all ranks call :meth:`restart`.
        """
        if self.given_up:
            return 0
        self._exchange()
        self._watch()
        return -1 if self._failure else len(self._replies)

    def take(self, limit: int, max_pairs: int) -> list[StepResult]:
        """Results of up to ``limit`` replies, in the order in which the steps ended. Takes no further result
        once there are ``max_pairs`` pairs or more: what a reply has left comes next."""
        taken: list[StepResult] = []
        num_pairs = 0
        while limit > 0 and self._replies and num_pairs < max_pairs:
            num_shed, results = self._replies[0]
            while self._taken_of_reply < len(results) and num_pairs < max_pairs:
                taken.append(results[self._taken_of_reply])
                num_pairs += taken[-1].num_pairs
                self._taken_of_reply += 1
            if self._taken_of_reply == len(results):
                self._replies.popleft()
                self._taken_of_reply = 0
                limit -= 1
                self.steps_shed += num_shed
                self.outstanding -= 1
                self._of_all -= self._of_prompts.popleft()
                self._forgive()
        self._steps_taken += len(taken)
        return taken

    def _forgive(self) -> None:
        """A reply was taken. After ``FORGIVEN_AFTER`` of them, one restart is forgiven."""
        self._replies_taken += 1
        if self._replies_taken == FORGIVEN_AFTER:
            self._replies_taken = 0
            self._unforgiven = max(self._unforgiven - 1, 0)

    def restart(self) -> None:
        """Forget all requests and replies, and start a new process. Give up after ``MAX_RESTARTS`` that were
        not forgiven."""
        if self.given_up:
            return
        reason = self._failure or "it failed on another tensor-parallel rank"
        self._stop()
        if self._unforgiven < MAX_RESTARTS:
            self._unforgiven += 1
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
        """End the process for good."""
        self.given_up = True
        self._stop()

    @property
    def pid(self) -> int:
        """Id of the process, or 0 if there is none."""
        return 0 if self._child is None else self._child.pid

    def _start(self) -> None:
        # -P keeps the current folder out of ``sys.path``. ``_PROGRAM`` appends the folder that has our package.
        package = str(Path(__file__).resolve().parents[2])
        command = [sys.executable, "-P", "-c", _PROGRAM, package]
        # A single BLAS thread is enough, because the arrays are small.
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
        """Send and receive as much as possible without waiting."""
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
        """Unpickle the complete messages among the received bytes."""
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
        """Add up the time since the last received bytes while a reply is awaited. If this silence lasts too
        long, the process counts as failed."""
        now = time.monotonic()
        waited = min(now - self._polled, _LONGEST_PAUSE)
        self._polled = now
        is_awaited = not self._has_started or self.outstanding > len(self._replies)
        self._silent = self._silent + waited if is_awaited else 0.0
        if self._silent > (SILENT_SECONDS if self._has_started else START_SECONDS):
            self._failure = self._failure or f"no reply for {self._silent:.0f} seconds"
