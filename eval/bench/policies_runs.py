# SPDX-License-Identifier: Apache-2.0
"""Accuracy of policies, a run folder each; their throughput on replays, in turns with stock SGLang."""

import contextlib
import hashlib
import itertools
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eval.bench.policies_points import Point, flags_of
from eval.bench.serve import SERVER_FLAGS, run_in_turns
from eval.measures.figures import matched_step_ms, of_cells
from eval.methods import DENSE
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
        flags = (_SERVER_FLAGS, *_TASK_FLAGS[self.task], *flags_of(method))
        words = ["--tasks", self.task, "--methods", method, "--limit", self.problems]
        words += ["--in-flight", IN_FLIGHT, "--max-tokens", MAX_TOKENS, "--kv-budget", _KV_BUDGET]
        words += [
            "--device",
            "cpu",
            "--server-flags",
            " ".join(flags),
            "--out",
            self.folder(method),
        ]
        return [sys.executable, "-m", "eval.run", *map(str, words)]


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


TASK = "aime24_replay"
#: Tokens of the pieces of responses: of unlike lengths, so that requests do not run in waves.
PIECES = (1000, 1300, 1600)
LIMIT = 8
#: Two or three requests of a stock server: memory must decide how many run.
KV_BUDGET = 2700
_FLAGS = ("--attention-backend", "reasoncache_cpu", *SERVER_FLAGS)
#: A stock server beside them: each holds up to 3 GB.
_TOGETHER = 3

#: What :func:`timing` says of a policy against stock; fields as in docs/evaluation.md.
Timing = dict[str, Any]


def groups(points: Sequence[Point]) -> list[list[Point]]:
    """Points that take turns with one stock server: few at a time, and of the same flags."""
    alike: dict[tuple[str, ...], list[Point]] = {}
    for point in sorted(points, key=lambda point: flags_of(point.method)):
        alike.setdefault(flags_of(point.method), []).append(point)
    return [g[at : at + _TOGETHER] for g in alike.values() for at in range(0, len(g), _TOGETHER)]


def measure(
    points: Sequence[Point], records_path: Path, model: str, rounds: int, home: Path
) -> dict[str, Timing]:
    """Run one group, or go on with it; by policy, without those that could not be measured."""
    methods = [DENSE, *(point.method for point in points)]
    folder = home / ",".join(point.policy for point in points)
    for method, seed in itertools.product(methods, range(rounds)):
        _forget_half(Cell(folder, TASK, method, seed))
    options: dict[str, Any] = dict(
        model=model, limit=LIMIT, data={TASK: str(records_path)}, temperature=0.0
    )
    options |= dict(kv_budget=KV_BUDGET, warm_up=2)
    # Of steps between two lines of a server's log: batches last some hundred.
    options |= dict(decode_log_interval=4, server_flags=(*_FLAGS, *flags_of(points[0].method)))
    cells = run_in_turns(TASK, methods, rounds, folder, **options)
    found = {point.policy: timing(cells[point.method], cells[DENSE]) for point in points}
    return {policy: one for policy, one in found.items() if one is not None}


def timing(cells: Sequence[Cell], dense: Sequence[Cell]) -> Timing | None:
    """Sum rounds up, those that both have measured in one go; None without any. Steps are None if
    the two have too few batches in common; ``reproduced``: responses that are word for word."""
    rates = [(_rate(one), _rate(other)) for one, other in zip(cells, dense, strict=True)]
    ratios = [one / other for one, other in rates if one and other]
    if not ratios:
        return None
    totals = pd.DataFrame([leg.report.get("totals", {}) for c in cells for leg in c.legs()])
    spent, steps = totals.reindex(columns=["scheduler_seconds", "decode_steps"]).sum()
    timelines = ([m for cell in side for m in cell.timeline()] for side in (cells, dense))
    step_ms, dense_step_ms = matched_step_ms(*timelines) or (None, None)
    seen = of_cells(cells)
    graded = [row.correct for cell in cells for row in cell.results()]
    return {
        "throughput_ratio": statistics.median(ratios),
        "throughput_ratios": ratios,
        "step_ms": step_ms,
        "dense_step_ms": dense_step_ms,
        "scheduler_ms": 1e3 * float(spent / steps) if steps else None,
        "saved": seen.saving,
        "mean_running": seen.mean_running,
        "dense_mean_running": of_cells(dense).mean_running,
        "retractions": seen.retractions,
        "leaked_slots": seen.leaked_slots,
        "reproduced": sum(graded) / len(graded) if graded else None,
    }


def _rate(cell: Cell) -> float | None:
    return of_cells([cell]).tokens_per_s


def _forget_half(cell: Cell) -> None:
    """Delete a cell that was stopped half-way; gone on with it would have no throughput."""
    if cell.folder.is_dir() and (len(cell.answered()) < LIMIT or _rate(cell) is None):
        shutil.rmtree(cell.folder)
