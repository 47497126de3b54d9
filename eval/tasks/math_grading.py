# SPDX-License-Identifier: Apache-2.0
"""Whether two answers in LaTeX are equal, in bounded time and memory whatever they say."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

from eval.tasks.task import TaskError

_WORKER = Path(__file__).with_name("math_worker.py")
_START_S = 120.0
_MAX_REPLY_BYTES = 4096


class MathGrader:
    """One child process with math-verify, started when first needed and again after it was killed.

    May be called from any thread; calls wait for each other.
    """

    def __init__(self, limit_s: float = 15.0, memory_bytes: int = 2 << 30) -> None:
        """
        Args:
            limit_s: seconds for one comparison, after which the child is killed.
            memory_bytes: address space of the child.
        """
        self.limit_s = limit_s
        self.memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def equal(self, reference: str, answer: str) -> tuple[bool, str]:
        """Whether the answers are the same, and why the comparison failed, "" if it did not.

        Raises:
            TaskError: the child does not start.
        """
        with self._lock:
            if self._process is None:
                self._start()
            job = json.dumps({"reference": reference, "answer": answer}) + "\n"
            process = self._process
            assert process is not None and process.stdin is not None
            try:
                process.stdin.write(job.encode("ascii"))
                process.stdin.flush()
                reply = self._reply(self.limit_s)
            except BrokenPipeError:
                reply = b""
            if not reply:
                self._stop()
                fault = "the process ended" if reply == b"" else f"more than {self.limit_s:g} s"
                return False, f"not comparable: {fault}"
            result = json.loads(reply)
            if isinstance(result, bool):
                return result, ""
            # What is left of an exhausted process is not worth keeping.
            if result != "timed out":
                self._stop()
            return False, f"not comparable: {result}"

    def close(self) -> None:
        """End the child; a later comparison starts another."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER), str(self.memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                # Ctrl-C is for the run, which closes this in its own time.
                start_new_session=True,
            )
        except OSError as error:
            raise TaskError(f"math-verify's process did not start: {error}") from error
        reply = self._reply(_START_S)
        if reply != b'"ready"':
            self._stop()
            raise TaskError(f"math-verify's process did not start: {reply!r}")

    def _reply(self, limit_s: float) -> bytes | None:
        """The next line, None if none comes in time, b"" if none will."""
        assert self._process is not None and self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                return None
            part = os.read(pipe, _MAX_REPLY_BYTES)
            if not part or len(self._buffer) > _MAX_REPLY_BYTES:
                return b""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                # A request that nobody will read any more.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


GRADER = MathGrader()
atexit.register(GRADER.close)


def require() -> None:
    """
    Raises:
        TaskError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise TaskError("mathematics is graded by math-verify: pip install math-verify")
