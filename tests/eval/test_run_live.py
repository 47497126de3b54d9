# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.run`` as an operator calls it, against real servers of the embedded model."""

from __future__ import annotations

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
from eval.runs.folder import Cell, cells, read_config
from eval.serving import ServerProcess
from tests.server.specs import STOCK

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = 8
BASE = ("--tasks", "tiny_reasoner", "--limit", str(PROBLEMS), "--warm-up", "2")


def start(*argv: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "eval.run", *argv], subprocess.PIPE
    # Tests that run in the background of a shell inherit that Ctrl-C is ignored.
    heeded = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, preexec_fn=heeded
    )


def run(*argv: str, status: int = 0) -> str:
    process = start(*argv)
    out, _ = process.communicate(timeout=1800)
    assert process.returncode == status, out
    return out


def wait_for_responses(cell: Cell, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 1200
    while len(cell.answered()) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {count} responses in {cell.folder}"
        time.sleep(0.02)


def assert_complete(cell: Cell) -> None:
    rows = cell.responses()
    answered = sorted(row.problem_id for row in rows if row.error is None)
    assert len(answered) == len(set(answered)) == PROBLEMS
    assert all(row.output_tokens > 0 and row.text for row in rows if row.error is None)
    legs = cell.legs()
    assert legs[-1].responses == sum(row.leg == legs[-1].leg for row in rows)
    results = cell.results()
    assert sorted(row.problem_id for row in results) == answered
    assert sum(row.correct for row in results) >= PROBLEMS - 2


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """SIGKILL in the middle of a cell, and of a line: nothing is lost and nothing asked twice."""
    out = tmp_path / "run"
    argv = (*BASE, "--methods", "reasoncache", "--in-flight", "4", "--kv-budget", "4000")
    first = start(*argv, "--out", str(out))
    cell = Cell(out, "tiny_reasoner", "reasoncache", 0)
    try:
        wait_for_responses(cell, 2, first)
        children = psutil.Process(first.pid).children(recursive=True)
    finally:
        first.kill()
        first.communicate()
    assert psutil.wait_procs(children, timeout=30)[1] == []
    kept = cell.answered()
    assert 2 <= len(kept) < PROBLEMS
    with (cell.folder / "responses.jsonl").open("a") as file:
        file.write('{"problem_id": "tiny_reasoner-0-7", "leg": 0, "te')
    told = run(*argv, "--seeds", "1", "--out", str(out), status=1)
    assert "seeds is [0] in this run, now [1]" in told
    run(*argv, "--out", str(out))
    assert [found.method for found in cells(out)] == ["reasoncache"]
    assert_complete(cell)
    leg, timeline = cell.legs()[-1], cell.timeline()
    assert leg.leaked_slots == 0 and leg.decode_steps > 0
    assert cell.log_path(leg.leg).is_file()
    # A step that ends the last request is logged after its slots came back.
    assert all(0 <= moment.used <= 4000 and moment.running <= 4 for moment in timeline)
    assert max(moment.used for moment in timeline) > 0
    assert {row.leg for row in cell.responses()} == {0, 1}
    assert {name: cell.answered()[name] for name in kept} == kept
    totals = leg.report["totals"]
    # The warm-up was flushed away, and the totals with it.
    assert totals["requests_finished"] == PROBLEMS - len(kept)
    assert 0 < totals["affected_ratio"] < 1
    assert max(moment.saved for moment in timeline) > 0
    assert len(read_config(out)["resumed"]) == 1
    before = cell.results()
    (cell.folder / "results.jsonl").unlink()
    # What is answered is graded again, and no server starts.
    run(*argv, "--out", str(out))
    assert cell.results() == before
    assert len(list((out / "servers").glob("*.log"))) == 2
    command.run(Options, report_of, [str(out)])
    document = (out / "report" / "REPORT.md").read_text()
    assert "ReasonCache" in document and "resumed" in document
    assert (out / "report" / "summary.json").is_file()


@pytest.mark.parametrize("server", [STOCK], indirect=True)
def test_a_given_server_and_ctrl_c(server: ServerProcess, tmp_path: Path) -> None:
    out = tmp_path / "run"
    argv = (*BASE, "--methods", "dense", "--url", f"dense={server.url}", "--out", str(out))
    first = start(*argv, "--in-flight", "1")
    cell = Cell(out, "tiny_reasoner", "dense", 0)
    wait_for_responses(cell, 1, first)
    os.kill(first.pid, signal.SIGINT)
    told, _ = first.communicate(timeout=120)
    assert first.returncode == 130, told
    assert len(cell.answered()) < PROBLEMS
    (leg,) = cell.legs()
    assert (leg.leg, leg.leaked_slots, leg.command) == (0, None, [])
    assert leg.responses == len(cell.answered())
    run(*argv, "--in-flight", "1")
    assert_complete(cell)
    assert [(leg.leg, leg.report) for leg in cell.legs()] == [(0, {}), (1, {})]
    assert cell.timeline() == [] and not (out / "servers").exists()
    assert read_config(out)["method_details"]["dense"]["url"] == server.url
