# SPDX-License-Identifier: Apache-2.0
"""What the bench of siblings makes of recorded runs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eval.bench.siblings import ACROSS, majority, row_of
from eval.methods import DENSE, find_method
from eval.runs.folder import Cell
from tests.eval.peer import response, result, served


def _cell(home: Path, method: str, seconds: float, right: int, **totals: float) -> Cell:
    cell = Cell(home, "small_reasoner_x2", method, 0)
    names = [f"small_reasoner-0-{i}.{k}" for i in range(2) for k in range(2)]
    rows = [response(name, output_tokens=100) for name in names]
    flags = ["--enable-reasoncache"] * bool(totals)
    told: dict[str, Any] = {"command": ["server", *flags], "seconds": seconds}
    cell.write(rows, [], served(totals or None, output_tokens=400, responses=4, **told))
    results = [result(name, i < right) for i, name in enumerate(names)]
    cell.write_results([dataclasses.replace(one, extracted=str(one.correct)) for one in results])
    return cell


def test_a_row_is_ours_over_stock(tmp_path: Path) -> None:
    assert find_method(ACROSS).values["scope"] == "prompt"
    totals = {"memory_saving_ratio": 0.4, "across_ratio": 0.25, "polls": 10.0}
    totals |= {"final_saving_ratio": 0.5, "requests_finished": 4.0}
    ours = _cell(tmp_path, ACROSS, 8.0, 3, **totals)
    row = row_of([ours], [_cell(tmp_path, DENSE, 10.0, 4)])
    assert row["throughput_ratio"] == pytest.approx(1.25)
    assert (row["saved"], row["saved_at_the_end"]) == (0.4, 0.5)
    assert row["saved_across"] == pytest.approx(0.1)
    assert row["accuracy_ratio"] == pytest.approx(0.75)
    # One answer of two to the second problem is right, and it is the first.
    assert (row["majority"], row["dense_majority"]) == (1.0, 1.0)


def test_a_majority_is_of_one_problem_and_its_answer() -> None:
    answers: dict[str, str | None] = {
        "p.0": "4", "p.1": "3", "p.2": "3", "q.0": "4", "q.1": "5", "r.0": "4",
    }  # fmt: skip
    answers |= {"s.0": None, "s.1": None, "s.2": "4"}
    found = [dataclasses.replace(result(at, x == "4"), extracted=x) for at, x in answers.items()]
    assert majority(found) == pytest.approx(2 / 4)
