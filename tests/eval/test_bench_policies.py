# SPDX-License-Identifier: Apache-2.0
"""``bench-policies``: what it plans, and what its rows, table and picture say."""

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from eval import command
from eval.bench import policies
from eval.bench.policies import POLICIES, Options, method_of, points
from eval.methods import DENSE, find_method
from eval.runs.folder import Cell
from eval.tiny_reasoner import EMBEDDED_SETTINGS
from tests.eval.peer import moment, response, result, served


def asked(*words: str) -> Options:
    return command.parse(Options, list(words))


def test_every_setting_is_a_method_that_the_server_takes() -> None:
    found = points(POLICIES, asked().saved)
    methods = [point.method for point in found]
    assert len(set(methods)) == len(methods)
    for method in methods:
        assert find_method(method, EMBEDDED_SETTINGS).shares
    assert {point.policy for point in found} == set(POLICIES)
    assert {point.aim for point in found if point.policy == "reasoncache"} == {0.1, 0.2}
    # SnapKV saves prompts only.
    assert {point.aim for point in found if point.policy == "snapkv"} == {0.1}


def test_a_budget_leaves_out_what_is_aimed_at() -> None:
    """Averaged over the steps of a request that grows from 45 positions to 580."""
    lengths = range(45, 580)
    for saving in (0.1, 0.2, 0.4, 0.6):
        method = method_of("keydiff", saving)
        assert method is not None
        budget = int(method.split("budget=")[1].split(":")[0])
        left_out = sum(max(0, length - budget) for length in lengths)
        assert left_out / sum(lengths) == pytest.approx(saving, abs=0.005)


def test_rows_table_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[dict[str, Any]] = []

    def in_turns(
        task: str, methods: list[str], rounds: int, out: Path, **how: Any
    ) -> dict[str, list[Cell]]:
        called.append({"methods": methods, "out": out, **how})
        for number, name in enumerate(methods):
            cell = Cell(out, task, name, 0)
            names = [f"p{i}" for i in range(8)]
            totals = {"memory_saving_ratio": 0.1 * number, "polls": 9} if number else None
            cell.write([response(one) for one in names], [moment(0)], served(totals))
            cell.write_results([result(one, i >= number) for i, one in enumerate(names)])
        return {name: [Cell(out, task, name, 0)] for name in methods}

    monkeypatch.setattr(policies.sides, "in_turns", in_turns)
    words = ["--out", str(tmp_path), "--saved", "0.1", "--problems", "8"]
    policies.work(asked(*words, "--policies", "reasoncache,keydiff"))
    (call,) = called
    assert call["methods"][0] == DENSE
    found = json.loads((tmp_path / "policies.json").read_text())
    rows = {row["policy"]: row for row in found["rows"]}
    assert found["dense"]["accuracy"] == 1.0 and rows["keydiff"]["accuracy"] == 0.75
    assert rows["keydiff"]["saved"] == pytest.approx(0.2)
    assert rows["keydiff"]["accuracy_difference"] == -0.25
    told = capsys.readouterr().out
    assert told.startswith("### Policies at equal saving") and "| keydiff" in told
    assert imread(tmp_path / "policies.png").std() > 0.02
