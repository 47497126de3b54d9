# SPDX-License-Identifier: Apache-2.0
"""Accuracy of many methods on the same problems: a run folder each, some at work at a time."""

import contextlib
import hashlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.bench.policies_points import flags_of
from eval.runs.folder import Cell, write_whole
from eval.serving import kill_when_we_die

IN_FLIGHT = 48
#: Answers that nothing garbled have 751 tokens at most.
MAX_TOKENS = 1000
#: Room for all in flight: memory is not to decide what is answered.
_KV_BUDGET = 56_000
#: Evicted positions need attention that skips them; dense gets the same.
_SERVER_FLAGS = "--attention-backend reasoncache_cpu"
#: Flags for the tasks: KeyDiff's blocks of a long prompt are prefill chunks.
_TASK_FLAGS = {"tiny_reasoner": (), "tiny_reasoner_long": ("--chunked-prefill-size", "128")}
SHORT, LONG = _TASK_FLAGS
LOG = "bench.log"


@dataclass(frozen=True)
class Runs:
    """Runs of one number of problems, a folder each in ``home``."""

    home: Path
    problems: int
    task: str = SHORT

    def folder(self, method: str) -> Path:
        """Short and fit for a file system, whatever the method's options."""
        digest = hashlib.sha256(method.encode()).hexdigest()[:8]
        return self.home / f"{re.sub('[^A-Za-z0-9.+=]+', '-', method)[:60]}-{digest}"

    def cell(self, method: str) -> Cell:
        return Cell(self.folder(method), self.task, method, seed=0)

    def whole(self, method: str) -> bool:
        """Whether every problem is answered and graded."""
        cell = self.cell(method)
        return min(len(cell.answered()), len(cell.results())) >= self.problems

    def command(self, method: str) -> list[str]:
        server_flags = (_SERVER_FLAGS, *_TASK_FLAGS[self.task], *flags_of(method))
        flags = {
            "--tasks": self.task,
            "--methods": method,
            "--limit": self.problems,
            "--in-flight": IN_FLIGHT,
            "--max-tokens": MAX_TOKENS,
            "--kv-budget": _KV_BUDGET,
            "--device": "cpu",
            "--server-flags": " ".join(server_flags),
            "--out": self.folder(method),
        }
        words = [str(word) for flag in flags.items() for word in flag]
        return [sys.executable, "-m", "eval.run", *words]


def carry_out(
    runs: Runs, methods: Sequence[str], jobs: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Run what is not whole, ``jobs`` at a time; what failed, and the end of what its run said."""
    waiting = [method for method in methods if not runs.whole(method)]
    failed: dict[str, str] = {}
    working: dict[str, subprocess.Popen[bytes]] = {}
    with contextlib.ExitStack() as ending:
        while waiting or working:
            while waiting and len(working) < jobs:
                method = waiting.pop(0)
                working[method] = _start(runs, method, ending)
            time.sleep(0.5)
            for method in [name for name, process in working.items() if process.poll() is not None]:
                status = working.pop(method).returncode
                if status or not runs.whole(method):
                    log = runs.folder(method) / LOG
                    said = log.read_text(errors="replace").split("\n")
                    failed[method] = next((x[-300:] for x in said[::-1] if x.strip()), "no output")
                    say(f"{method}: failed, {log}: {failed[method]}")
                else:
                    results = runs.cell(method).results()
                    score = sum(row.score for row in results) / len(results)
                    say(f"{method}: accuracy {score:.3f}; {len(waiting) + len(working)} left")
    return failed


def _start(runs: Runs, method: str, ending: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """One ``eval.run`` that dies with us; what it says goes to a log beside its records."""
    log = runs.folder(method) / LOG
    write_whole(log, "")
    with log.open("wb") as out:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        process = subprocess.Popen(runs.command(method), start_new_session=True, **pipes)
    guard = kill_when_we_die(process.pid)

    def end() -> None:
        # SIGTERM lets it close its server and complete its records.
        process.terminate()
        process.wait()
        guard.kill()
        guard.communicate()

    ending.callback(end)
    return process
