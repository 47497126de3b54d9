# SPDX-License-Identifier: Apache-2.0
"""Grading without a server: what was left over, and what one grader lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eval.run import main
from eval.runs import work
from eval.runs.config import make_config, settle_config
from eval.runs.folder import Cell, read_config
from eval.runs.grading import grade_cell
from eval.runs.options import from_config, make_options
from eval.runs.problems import ProblemSet
from eval.runs.records import Response
from eval.tasks.mathematics import AIME24
from eval.tasks.registry import find_task
from eval.tasks.sandbox import SandboxError
from eval.tasks.task import Problem


def response(problem: str, text: str, error: str | None = None) -> Response:
    return Response(problem, 0, "r", text, 5, 9, 0.0, 0.1, 1.0, "length", error)


def test_reasoning_that_the_prompt_opened_holds_no_answer(tmp_path: Path) -> None:
    """A response cut off within it has neither tag."""
    cell = Cell(tmp_path, "aime24", "dense", 0)
    problems = [Problem(name, "q", "7") for name in ("cut", "whole")]
    problems.append(Problem("replayed", "q", "7", "", {"ignore_eos": True}, 9))
    cell.append(response("cut", "Perhaps \\boxed{7}? No,"))
    cell.append(response("whole", "Perhaps 8? No.</think> \\boxed{7}"))
    cell.append(response("replayed", "\\boxed{7}"))
    for opens, right in ((True, [False, True, True]), (False, [True] * 3)):
        assert [row.correct for row in grade_cell(cell, AIME24, problems, opens)] == right


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two tasks; both problems of the first are answered, one of the second."""
    data = {}
    for name in ("aime24", "aime25"):
        data[name] = tmp_path / f"{name}.jsonl"
        rows = [{"id": i, "problem": f"{i} + 1", "answer": str(i + 1)} for i in range(2)]
        data[name].write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = make_options(
        {
            "tasks": list(data),
            "methods": ["dense"],
            "data": {name: str(path) for name, path in data.items()},
            "device": "cpu",
        }
    )
    problems = ProblemSet(options, {name: find_task(name) for name in data})
    folder = tmp_path / "run"
    methods = work.find_methods(["dense"])
    config = make_config(options, methods, problems.all_measured, {}, False)
    settle_config(folder, config)
    for name in data:
        asked = problems.measured(name, 0)
        cell = Cell(folder, name, "dense", 0)
        for problem in asked[: 2 if name == "aime24" else 1]:
            cell.append(response(problem.id, f"\\boxed{{{problem.reference}}}"))
    return folder


def test_what_is_not_answered_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--grade", str(run)]) == 1
    told = capsys.readouterr().out
    assert "aime24, dense, seed 0: 2 graded, score 1.000" in told
    assert "aime25, dense, seed 0: 1 problems are not answered" in told
    cell = Cell(run, "aime25", "dense", 0)
    options = from_config(read_config(run))
    asked = ProblemSet(options, {name: find_task(name) for name in options.tasks})
    cell.append(response(asked.measured("aime25", 0)[1].id, "\\boxed{0}"))
    assert main(["--grade", str(run)]) == 0


def test_a_grader_that_cannot_run_does_not_stop_the_others(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grade = work.grade_cell

    def lacking(cell: Cell, *rest: Any) -> Any:
        if cell.task == "aime24":
            raise SandboxError("no user namespaces")
        return grade(cell, *rest)

    monkeypatch.setattr(work, "grade_cell", lacking)
    assert main(["--grade", str(run)]) == 1
    told = capsys.readouterr().out
    assert "aime24, dense, seed 0: not graded: no user namespaces" in told
    assert "aime25, dense, seed 0: 1 graded" in told
