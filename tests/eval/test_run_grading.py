# SPDX-License-Identifier: Apache-2.0
"""Grading without a server: what was left over, and what one grader lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.run import main
from eval.runs import work
from eval.runs.config import make_config, options_of, settle_config
from eval.runs.folder import Cell, read_config
from eval.runs.options import RunOptions
from eval.runs.plan import Plan
from eval.runs.session import grade
from eval.tasks.harness import EvalTask, Source
from eval.tasks.sandbox import SandboxError
from tests.eval.rows import response


def write(path: Path, *answers: int) -> Path:
    rows = [{"id": i, "problem": f"{i} + 1", "answer": str(a)} for i, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_reasoning_that_the_prompt_opened_holds_no_answer(tmp_path: Path) -> None:
    """A response cut off within it has neither tag; a request that failed is a wrong answer."""
    cell = Cell(tmp_path, "aime24", "dense", 0)
    task = EvalTask("aime24", Source(file=str(write(tmp_path / "x.jsonl", 7, 7, 7, 7))))
    cell.append(response("0", text="Perhaps \\boxed{7}? No,"))
    cell.append(response("1", text="Perhaps 8? No.</think> \\boxed{7}"))
    cell.append(response("2", error="timed out"))
    for opens, right in ((True, [False, True, False]), (False, [True, True, False])):
        results = grade(cell, task, opens)
        assert [row.correct for row in results] == right
        assert results[2].note == "no response: timed out" and results == cell.results()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two tasks; both problems of the first are answered, one of the second."""
    data = {n: str(write(tmp_path / f"{n}.jsonl", 1, 2)) for n in ("aime24", "aime25")}
    options = RunOptions(tasks=tuple(data), methods=("dense",), data=data, device="cpu")
    folder = tmp_path / "run"
    settle_config(folder, make_config(Plan(options, {}), work.find_methods(["dense"]), False))
    for name in data:
        cell = Cell(folder, name, "dense", 0)
        for i in range(2 if name == "aime24" else 1):
            cell.append(response(str(i), text=f"\\boxed{{{i + 1}}}"))
    return folder


def test_what_is_not_answered_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--grade", str(run)]) == 1
    told = capsys.readouterr().out
    assert "aime24, dense, seed 0: 2 graded, score 1.000" in told
    assert "aime25, dense, seed 0: 1 problems are not answered" in told
    cell = Cell(run, "aime25", "dense", 0)
    assert options_of(read_config(run)).tasks == ("aime24", "aime25")
    cell.append(response("1", text="\\boxed{0}"))
    assert main(["--grade", str(run)]) == 0


def test_a_grader_that_cannot_run_does_not_stop_the_others(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = work.grade

    def lacking(cell: Cell, *rest: Any) -> Any:
        if cell.task == "aime24":
            raise SandboxError("no user namespaces")
        return original(cell, *rest)

    monkeypatch.setattr(work, "grade", lacking)
    assert main(["--grade", str(run)]) == 1
    told = capsys.readouterr().out
    assert "aime24, dense, seed 0: not graded: no user namespaces" in told
    assert "aime25, dense, seed 0: 1 graded" in told
