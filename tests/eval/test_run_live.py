# SPDX-License-Identifier: Apache-2.0
"""Runs ``python -m eval.run`` as an operator does, with real servers of the embedded model."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eval import command
from eval.report.__main__ import Options
from eval.report.__main__ import work as report_of
from eval.runs.folder import Cell, cells

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = 8
BASE = ("--tasks", "tiny_reasoner", "--limit", str(PROBLEMS), "--warm-up", "2")


def start(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eval.run", *argv]
    pipe = subprocess.PIPE
    # Background jobs of shell scripts and their child processes ignore SIGINT: ``heeded`` restores the default.
    heeded = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, preexec_fn=heeded
    )


@pytest.mark.long
def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    """Ctrl-C in the second cell leaves no server running. The same command, run again, keeps the first cell."""
    out = tmp_path / "run"
    argv = (*BASE, "--methods", "dense,reasoncache", "--kv-budget", "4000", "--out", str(out))
    first = start(*argv)
    dense, ours = (Cell(out, "tiny_reasoner", name, 0) for name in ("dense", "reasoncache"))
    deadline = time.monotonic() + 1200
    while not dense.measured:
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = psutil.Process(first.pid).children(recursive=True)
    os.kill(first.pid, signal.SIGINT)
    told, _ = first.communicate(timeout=120)
    assert first.returncode == 130, told
    assert psutil.wait_procs(children, timeout=30)[1] == []
    kept = dense.responses()
    again = start(*argv)
    told, _ = again.communicate(timeout=1800)
    assert again.returncode == 0, told
    assert cells(out) == [dense, ours] and dense.responses() == kept
    for cell in (dense, ours):
        rows = cell.responses()
        served = cell.served()
        timeline = cell.timeline()
        assert len(cell.answered()) == len(rows) == served.responses == PROBLEMS
        assert all(row.output_tokens > 0 and row.text for row in rows)
        assert sum(row.correct for row in cell.results()) >= PROBLEMS - 2
        assert served.leaked_slots == 0 and served.decode_steps > 0 and served.cpu_seconds > 0
        # ``used`` may be 0, because the last step is logged after its requests freed their slots.
        assert all(0 <= moment.used <= 4000 for moment in timeline)
        assert max(moment.used for moment in timeline) > 0
    (totals,) = ours.served().totals()
    # The flush after the warm-up reset the totals, so they do not count the warm-up.
    assert totals["requests_finished"] == PROBLEMS and dense.served().reports == []
    command.run(Options, report_of, [str(out)])
    document = (out / "report" / "REPORT.md").read_text()
    assert "| reasoncache" in document and (out / "report" / "summary.json").is_file()
