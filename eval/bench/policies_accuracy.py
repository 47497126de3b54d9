# SPDX-License-Identifier: Apache-2.0
"""Accuracy of many methods on the same problems: a run folder each, two at work at a time.

Accuracy does not mind company, and a server keeps one core busy: its start, most of all.
What was measured stays; the same call goes on after whatever stopped it.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.bench.policies_points import flags_of
from eval.runs.folder import Cell, write_whole
from eval.serving import kill_when_we_die

TASK = "tiny_reasoner"
DENSE = "dense"
SEED = 0
IN_FLIGHT = 48
#: Answers that nothing garbled have 751 tokens at most.
MAX_TOKENS = 1000
#: Room for all in flight: memory is not to decide what is answered.
KV_BUDGET = 56_000
#: Evicted positions need attention that skips them; dense gets the same.
SERVER_FLAGS = "--attention-backend reasoncache_cpu"
LONG_TASK = "tiny_reasoner_long"
#: KeyDiff's blocks of the prompt are prefill chunks.
LONG_FLAGS = f"{SERVER_FLAGS} --chunked-prefill-size 128"
LOG = "bench.log"
_POLL_S = 0.5


@dataclass(frozen=True)
class Runs:
    """Runs of one number of problems, a folder each in ``home``; a method may need more flags."""

    home: Path
    problems: int
    task: str = TASK
    server_flags: str = SERVER_FLAGS

    def folder(self, method: str) -> Path:
        """Short and fit for a file system, whatever the method's options."""
        digest = hashlib.sha256(method.encode()).hexdigest()[:8]
        return self.home / f"{re.sub('[^A-Za-z0-9.+=]+', '-', method)[:60]}-{digest}"

    def cell(self, method: str) -> Cell:
        return Cell(self.folder(method), self.task, method, SEED)

    def whole(self, method: str) -> bool:
        """Whether every problem is answered and graded."""
        cell = self.cell(method)
        return len(cell.answered()) >= self.problems and len(cell.results()) >= self.problems

    def command(self, method: str) -> list[str]:
        flags = {
            "--tasks": self.task,
            "--methods": method,
            "--seeds": SEED,
            "--limit": self.problems,
            "--in-flight": IN_FLIGHT,
            "--max-tokens": MAX_TOKENS,
            "--kv-budget": KV_BUDGET,
            "--device": "cpu",
            "--server-flags": " ".join((self.server_flags, *flags_of(method))),
            "--out": self.folder(method),
        }
        words = [str(word) for flag in flags.items() for word in flag]
        return [sys.executable, "-m", "eval.run", *words]


def carry_out(
    runs: Runs, methods: Sequence[str], jobs: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Run what is not whole, ``jobs`` at a time.

    Returns:
        What failed: method, and the end of what its run said. The others are not stopped by it.
    """
    waiting = [method for method in methods if not runs.whole(method)]
    total, began = len(waiting), time.monotonic()
    failed: dict[str, str] = {}
    working: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as ending:
        while waiting or working:
            while waiting and len(working) < jobs:
                method = waiting.pop(0)
                working[method] = _start(runs, method, ending)
            time.sleep(_POLL_S)
            for method, process in list(working.items()):
                if process.poll() is None:
                    continue
                del working[method]
                done = total - len(waiting) - len(working)
                left = (time.monotonic() - began) / 60 / done * (total - done)
                if process.returncode or not runs.whole(method):
                    log = runs.folder(method) / LOG
                    lines = [line.strip() for line in log.read_text(errors="replace").split("\n")]
                    failed[method] = next((x[-300:] for x in reversed(lines) if x), "no output")
                    say(f"{method}: failed, {log}: {failed[method]}")
                else:
                    results = runs.cell(method).results()
                    score = sum(row.score for row in results) / len(results)
                    say(f"{method}: accuracy {score:.3f}; {done} of {total}, {left:.0f} min left")
    return failed


def _start(runs: Runs, method: str, ending: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """One ``eval.run`` that dies with us; what it says goes to a log beside its records."""
    log = runs.folder(method) / LOG
    write_whole(log, "")
    with log.open("wb") as out:
        process = subprocess.Popen(
            runs.command(method),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    guard = kill_when_we_die(process.pid)

    def end() -> None:
        # SIGTERM lets it close its server and complete its records.
        process.terminate()
        process.wait()
        guard.kill()
        guard.communicate()

    ending.callback(end)
    return process
