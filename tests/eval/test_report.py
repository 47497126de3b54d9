# SPDX-License-Identifier: Apache-2.0
"""The report of run folders, good, thin, broken and hostile ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from eval.report.__main__ import main
from eval.report.data import load
from eval.runs.folder import Cell, write_config
from eval.runs.records import Response
from eval.tiny_reasoner import task as reasoner
from tests.eval.rows import leg, moment, response, result

HOSTILE = "500 | <script>alert(1)</script> `x` [a](http://evil.example)\n# heading\n| a | b |\ud800"


def write_run(
    run: Path,
    methods: dict[str, float],
    tasks: Sequence[str] = ("tiny_reasoner",),
    seeds: Sequence[int] = (0,),
    problems: int = 3,
    **config: Any,
) -> Path:
    """A whole run; ``methods`` with their saving, which also makes them that much faster."""
    titles = {"dense": "Dense", "reasoncache": "ReasonCache"}
    details = {method: {"title": titles.get(method, method)} for method in methods}
    asked = {"tasks": list(tasks), "methods": list(methods), "seeds": list(seeds)}
    asked |= {"method_details": details, "kv_budget": 4000, "decode_log_interval": 10}
    where = {"machine": {"cpu": "A CPU", "cores": 2}, "date": "2026-01-02T03:04:05+00:00"}
    where |= {"model": "tiny_reasoner", "versions": {"commit": "0123456789abcdef"}}
    write_config(run, {**asked, **where, **config})
    for task, seed, (method, saving) in itertools.product(tasks, seeds, methods.items()):
        fill(Cell(run, task, method, seed), problems, saving)
    return run


def fill(cell: Cell, problems: int, saving: float) -> None:
    """All answers but the first are right."""
    draw = random.Random(f"{cell.method}{cell.seed}")
    tokens, results = 0, []
    for i, problem in enumerate(reasoner.generate(cell.seed, problems)):
        name, length = f"tiny_reasoner-{cell.seed}-{i}", len(problem.response.split(" "))
        times = {"started": 0.0, "first_token": draw.random(), "ended": 1 + 0.01 * length}
        cell.append(response(name, text=problem.response, output_tokens=length, **times))
        results.append(result(name, i >= 1, "error" if problem.error else "clean", length))
        tokens += length
    cell.write_results(results)
    used = [min(4000, 200 * step) for step in range(40)]
    cell.append(*(moment(i, 1 + i // 4, n, int(saving * n)) for i, n in enumerate(used)))
    totals = {"memory_saving_ratio": saving, "polls": 40}
    totals |= {"final_saving_ratio": 1.5 * saving, "requests_finished": problems}
    command = ["serve", *(["--enable-reasoncache"] if saving else [])]
    seconds = 10 * (1 - saving) * draw.uniform(0.95, 1.05)
    row = {"output_tokens": tokens, "responses": problems, "command": command}
    cell.append(leg(0, totals if saving else None, seconds=seconds, **row))


def report(*arguments: str | Path) -> tuple[str, dict[str, Any], Path]:
    """Markdown, tables and folder."""
    assert main([*map(str, arguments)]) == 0
    out = Path(arguments[-1] if "--out" in arguments else Path(arguments[0]) / "report")
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return (out / "REPORT.md").read_text(encoding="utf-8"), summary["tables"], out


def row_of(tables: dict[str, Any], table: str, method: str) -> dict[str, str]:
    return next(row for row in tables[table] if row["method"] == method)


def test_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "full",
        {"dense": 0.0, "random": 0.21, "reasoncache": 0.2},
        seeds=(0, 1),
        problems=8,
    )
    text, tables, out = report(run)
    own = row_of(tables, "methods", "ReasonCache")
    assert (own["saved, decode steps"], own["saved, end of response"]) == ("20.0%", "30.0%")
    assert own["accuracy"].startswith("0.875 (") and own["affected"] == "-"
    assert [row["method"] for row in tables["methods"]] == ["Dense", "ReasonCache", "random"]
    cells = [[Cell(run, "tiny_reasoner", m, s) for s in (0, 1)] for m in ("reasoncache", "dense")]
    speeds = [[c.legs()[0].output_tokens / c.legs()[0].seconds for c in row] for row in cells]
    assert own["tokens/s"].startswith(f"{np.median(speeds[0]):.1f} (")
    pair = row_of(tables, "against_dense", "ReasonCache")
    ratio = np.median(np.divide(speeds[0], speeds[1]))
    assert pair["tokens/s ratio"].startswith(f"{ratio:.2f}")
    assert (pair["pairs"], pair["McNemar p"], pair["0.9/(1 - s)"]) == ("16", "1", "1.12")
    assert pair["response length ratio"] == "1.000 (1.000 to 1.000)"
    assert pair["accuracy kept"].startswith("1.000 (0.")
    assert {row["class"] for row in tables["classes"]} == {"clean", "error"}
    assert "commit 0123456789ab" in text and "A CPU, 2 cores, 2026-01-02T03" in text
    pictures = set(re.findall(r"\]\((.+?\.png)\)", text))
    assert pictures == {"accuracy_tiny_reasoner.png", "timeline_tiny_reasoner.png"}
    for name in pictures:
        pixels = image.imread(out / name)
        assert min(pixels.shape[:2]) > 200 and pixels.std() > 0.02, f"{name} is blank"


def test_an_unfinished_run_has_gaps(tmp_path: Path) -> None:
    savings = {"dense": 0.0, "reasoncache": 0.2}
    tasks = ("tiny_reasoner", "other")
    run = write_run(tmp_path / "half", savings, tasks, problems=4)
    config = json.loads((run / "config.json").read_text())
    config["methods"].append("memshare")
    write_config(run, config)
    cell = Cell(run, "tiny_reasoner", "reasoncache", 0)
    for name in ("legs", "results", "timeline"):
        (cell.folder / f"{name}.jsonl").unlink()
    with (cell.folder / "responses.jsonl").open("a") as file:
        file.write('{"problem_id": "cut o')
    _, tables, _ = report(run)
    row = row_of(tables, "methods", "ReasonCache")
    assert row["task"] == "tiny_reasoner" and row["accuracy"] == row["tokens/s"] == "-"
    counts = row_of(tables, "requests", "ReasonCache")
    assert (counts["answered"], counts["graded"]) == ("4", "0")
    assert "memshare" not in {row["method"] for row in tables["methods"]}


def test_a_resumed_cell_is_called_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"dense": 0.0, "reasoncache": 0.2})
    cell = Cell(run, "tiny_reasoner", "reasoncache", 0)
    first, (only,) = cell.responses()[0], cell.legs()
    cell.append(dataclasses.replace(first, problem_id="late", leg=1))
    cell.append(dataclasses.replace(only, leg=1, responses=1))
    _, tables, _ = report(run)
    row = row_of(tables, "methods", "ReasonCache")
    assert (row["tokens/s"], row["saved, decode steps"]) == ("resumed", "20.0%")
    assert row_of(tables, "against_dense", "ReasonCache")["tokens/s ratio"] == "-"


def test_runs_with_other_budgets_make_a_sweep(tmp_path: Path) -> None:
    budgets = ((4000, 0.2), (1000, 0.3), (16000, 0.01), (2000, 0.25))
    runs = [
        write_run(tmp_path / f"kv{slots}", {"dense": 0.0, "reasoncache": share}, kv_budget=slots)
        for slots, share in budgets
    ]
    path = runs[3] / "tiny_reasoner" / "dense" / "seed-0" / "legs.jsonl"
    had = json.loads(path.read_text())
    path.write_text(json.dumps({**had, "kv_slots": 1500}) + "\n")
    out = tmp_path / "out"
    text, tables, _ = report(*runs, "--out", out)
    rows = [row for row in tables["budgets"] if row["method"] == "ReasonCache"]
    assert [row["KV slots"] for row in rows] == ["1,000", "2,000", "4,000", "16,000"]
    assert float(rows[0]["over dense"]) > float(rows[-1]["over dense"])
    # Shown are the slots that servers had.
    dense = [row["KV slots"] for row in tables["budgets"] if row["method"] == "Dense"]
    assert dense == ["1,000", "1,500", "4,000", "16,000"]
    assert (out / "kv_budget_tiny_reasoner.png").is_file() and "### KV budget" in text


def test_a_replay_is_cut_where_it_differs_from_the_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"dense": 0.0}, ("aime24_replay",))
    cell = Cell(run, "aime24_replay", "dense", 0)
    rows = [dataclasses.replace(row, finish_reason="length") for row in cell.responses()]
    (cell.folder / "responses.jsonl").unlink()
    for row in rows:
        cell.append(row)
    # All but one are graded as the record.
    assert list(load([run]).cells["cut"]) == [1]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    named = {"model": "$\\frac{<img src=x>|", "command_line": "echo `id` | sh"}
    run = write_run(tmp_path / "run|<b>", {"dense": 0.0, "x<i>|[y](z)": 0.1}, **named)
    cell = Cell(run, "tiny_reasoner", "dense", 0)
    cell.append(Response("p", 0, HOSTILE, HOSTILE * 50, 1, 1, 0.0, None, 1.0, error=HOSTILE))
    cell.append(Response("q", 0, HOSTILE, HOSTILE, 1, 1, 0.0, 0.5, 1.0, HOSTILE))
    text, tables, _ = report(run)
    outside_code = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"<(script|img|b|i)\b", outside_code)
    assert "](http" not in outside_code and "](z)" not in outside_code
    assert "\n# heading" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    assert row_of(tables, "requests", "Dense")["failed attempts"] == "1"


@pytest.mark.parametrize("config", [None, {"tasks": ["t"], "methods": ["dense"], "seeds": [0]}])
def test_what_cannot_be_read_is_told(
    tmp_path: Path, config: dict[str, Any] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if config:
        write_config(tmp_path, config)
    assert main([str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
