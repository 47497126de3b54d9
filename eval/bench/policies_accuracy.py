# SPDX-License-Identifier: Apache-2.0
"""Accuracy of many methods on the same problems: a run folder each, two at work at a time.

Accuracy does not mind company, and a server keeps one core busy: its start, most of all.
What was measured stays; the same call goes on after whatever stopped it.
"""

from __future__ import annotations

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
#: Dropped positions need attention that skips them; dense gets the same.
SERVER_FLAGS = "--attention-backend reasoncache_cpu"
LONG_TASK = "tiny_reasoner_long"
#: KeyDiff's blocks of the prompt are prefill chunks.
LONG_FLAGS = f"{SERVER_FLAGS} --chunked-prefill-size 128"
LOG = "bench.log"
_POLL_S = 0.5


@dataclass(frozen=True)
class Runs:
    """Where the runs of one number of problems lie.

    Attributes:
        home: a folder for each method.
        problems: of each run.
        task: what is asked.
        server_flags: of all servers; a method may need more.
    """

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
        return [
            *(sys.executable, "-m", "eval.run"),
            *("--tasks", self.task),
            *("--methods", method),
            *("--seeds", str(SEED)),
            *("--limit", str(self.problems)),
            *("--in-flight", str(IN_FLIGHT)),
            *("--max-tokens", str(MAX_TOKENS)),
            *("--kv-budget", str(KV_BUDGET)),
            *("--device", "cpu"),
            *("--server-flags", " ".join((self.server_flags, *flags_of(method)))),
            *("--out", str(self.folder(method))),
        ]


def carry_out(
    runs: Runs, methods: Sequence[str], jobs: int, say: Callable[[str], None]
) -> dict[str, str]:
    """Run what is not whole, ``jobs`` at a time.

    Returns:
        What failed: method, and the end of what its run said. The others are not stopped by it.
    """
    waiting = [method for method in methods if not runs.whole(method)]
    total, began, done = len(waiting), time.monotonic(), 0
    failed: dict[str, str] = {}
    working: dict[str, _Process] = {}
    try:
        while waiting or working:
            while waiting and len(working) < jobs:
                method = waiting.pop(0)
                working[method] = _Process(runs.command(method), runs.folder(method))
            time.sleep(_POLL_S)
            for method, process in list(working.items()):
                status = process.status()
                if status is None:
                    continue
                working.pop(method).close()
                done += 1
                minutes = (time.monotonic() - began) / 60
                left = minutes / done * (total - done)
                if status or not runs.whole(method):
                    failed[method] = process.tail()
                    say(f"{method}: failed, {process.log}: {failed[method]}")
                else:
                    say(
                        f"{method}: {_score(runs.cell(method))}; {done} of {total}, {left:.0f} min left"
                    )
    finally:
        for process in working.values():
            process.close()
    return failed


def _score(cell: Cell) -> str:
    results = cell.results()
    return f"accuracy {sum(row.score for row in results) / len(results):.3f}"


class _Process:
    """One ``eval.run`` that dies with us; what it says goes to a log beside its records."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.log = folder / LOG
        write_whole(self.log, "")
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = kill_when_we_die(self._process.pid)

    def status(self) -> int | None:
        return self._process.poll()

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "no output")

    def close(self) -> None:
        # SIGTERM lets it close its server and complete its records.
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        self._guard.kill()
        self._guard.communicate()
