# SPDX-License-Identifier: Apache-2.0
"""The report of run folders, good, thin, broken and hostile ones."""

from __future__ import annotations

import dataclasses
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
from eval.runs.records import Leg, Moment, Response, Result
from eval.tiny_reasoner import task as reasoner

HOSTILE = "500 | <script>alert(1)</script> `x` [a](http://evil.example)\n# heading\n| a | b |\ud800"


def write_run(
    run: Path,
    methods: dict[str, float],
    *,
    tasks: Sequence[str] = ("tiny_reasoner",),
    seeds: Sequence[int] = (0, 1),
    problems: int = 8,
    **config: Any,
) -> Path:
    """A whole run; ``methods`` with their saving, which also makes them that much faster."""
    write_config(
        run,
        {
            "model": "tiny_reasoner",
            "tasks": list(tasks),
            "methods": list(methods),
            "seeds": list(seeds),
            "limit": problems,
            "kv_budget": 4000,
            "decode_log_interval": 10,
            "machine": {"cpu": "A CPU", "cores": 2, "gpus": []},
            "versions": {"commit": "0123456789abcdef"},
            "date": "2026-01-02T03:04:05+00:00",
            **config,
        },
    )
    for task in tasks:
        for seed in seeds:
            for method, saving in methods.items():
                fill(Cell(run, task, method, seed), problems, saving)
    return run


def fill(cell: Cell, problems: int, saving: float, wrong: int = 1) -> None:
    draw = random.Random(f"{cell.method}{cell.seed}")
    tokens, results = 0, []
    for i, problem in enumerate(reasoner.generate(cell.seed, problems)):
        name, length = f"tiny_reasoner-{cell.seed}-{i}", len(problem.response.split(" "))
        end = 1 + 0.01 * length
        cell.append(
            Response(name, 0, "r", problem.response, 30, length, 0.0, draw.random(), end, "stop")
        )
        right = i >= wrong
        group = "error" if problem.error else "clean"
        results.append(Result(name, right, float(right), problem.answer, "", group, length))
        tokens += length
    cell.write_results(results)
    for step in range(40):
        used = min(4000, 200 * step)
        cell.append(Moment(0, step, 1 + step // 4, 0, used, int(saving * used), 100.0))
    shares = saving > 0
    totals = {
        "memory_saving_ratio": saving,
        "looks": 40,
        "final_saving_ratio": 1.5 * saving,
        "requests_finished": problems,
    }
    flags = ["--enable-reasoncache", "--reasoncache-block", "8"] if shares else []
    report = {"totals": totals} if shares else {}
    seconds = 10 * (1 - saving) * draw.uniform(0.95, 1.05)
    cell.append(Leg(0, seconds, tokens, problems, 400, 2, report, 0, ["serve", *flags]))


def report(*arguments: str | Path) -> tuple[str, dict[str, Any], Path]:
    """Markdown, summary and folder."""
    assert main([*map(str, arguments), "--redundancy-responses", "2"]) == 0
    out = Path(arguments[arguments.index("--out") + 1] if "--out" in arguments else "")
    if "--out" not in arguments:
        out = Path(arguments[0]) / "report"
    text = (out / "REPORT.md").read_text(encoding="utf-8")
    return text, json.loads((out / "summary.json").read_text(encoding="utf-8")), out


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    savings = {
        "dense": 0.0, "reasoncache": 0.2, "random:match=reasoncache": 0.21, "cosine": 0.3,
        "cosine-structure": 0.28, "p20": 0.05, "p100": 0.3, "reasoncache:percentile=60": 0.15,
    }  # fmt: skip
    return report(write_run(tmp_path_factory.mktemp("runs") / "full", savings))


def test_every_table_and_picture_is_there(full: tuple[str, dict[str, Any], Path]) -> None:
    text, summary, out = full
    for name in ("table_1", "table_2", "table_3", "table_4", "against_dense", "requests"):
        assert summary["tables"][name]["rows"]
    pictures = set(re.findall(r"\]\((.+?\.png)\)", text))
    assert pictures == {f"{name}.png" for name in summary["figures"]}
    assert {path.name for path in out.glob("*.png")} == pictures
    assert pictures == {
        "accuracy_saving.png", "throughput.png", "ablation.png", "percentile.png", "lengths.png",
        "memory_tiny-reasoner.png", "redundancy.png", "heatmap.png",
    }  # fmt: skip
    for name in pictures:
        pixels = image.imread(out / name)
        assert min(pixels.shape[:2]) > 200 and pixels.std() > 0.02, f"{name} is blank"


def test_every_number_of_a_table_is_in_the_summary(
    full: tuple[str, dict[str, Any], Path],
) -> None:
    text, summary, _ = full
    rows = {
        "| " + " | ".join(entry["text"] for entry in row) + " |"
        for table in summary["tables"].values()
        for row in table["rows"]
    }
    # The redundancy tables are in the summary as figures of their own.
    printed = [
        line
        for line in text.split("Redundancy of")[0].splitlines()
        + text.split("### Requests")[1].splitlines()
        if line.startswith("|") and "---" not in line and not line.startswith(("| run", "| model"))
    ]
    assert len(printed) > 20 and set(printed) <= rows
    assert summary["figures"]["redundancy"]["tiny_reasoner"]["responses"] == 2


def test_numbers_are_those_of_the_records(full: tuple[str, dict[str, Any], Path]) -> None:
    text, summary, out = full
    own = table_row(summary, "table_1", "ReasonCache")
    assert own["AMSR"]["value"] == pytest.approx(0.2)
    assert own["tiny_reasoner: accuracy"]["value"]["value"] == pytest.approx(7 / 8)
    legs = [Cell(out.parent, "tiny_reasoner", "reasoncache", s).legs()[0] for s in (0, 1)]
    speeds = [leg.output_tokens / leg.seconds for leg in legs]
    assert own["tiny_reasoner: tokens/s"]["value"]["median"] == pytest.approx(np.median(speeds))
    row = table_row(summary, "speed_against_dense", "ReasonCache")
    assert row["0.9/(1 - s)"]["value"] == pytest.approx(0.9 / 0.8)
    assert row["answers longer"]["text"] == "no"
    pair = table_row(summary, "against_dense", "ReasonCache")
    assert pair["pairs"]["value"] == 16 and pair["McNemar p"]["value"] == 1
    assert "commit 0123456789ab, A CPU, 2 cores, 2026-01-02T03:04:05+00:00" in text
    # p80 did not run; ReasonCache's own percentile is 80.
    assert set(summary["figures"]["percentile"]["tiny_reasoner"]) == {
        "20.0",
        "60.0",
        "80.0",
        "100.0",
    }


def table_row(summary: dict[str, Any], table: str, method: str) -> dict[str, Any]:
    found = summary["tables"][table]
    at = found["columns"].index("method")
    row = next(row for row in found["rows"] if row[at]["text"] == method)
    return dict(zip(found["columns"], row, strict=True))


def test_the_heat_map_is_dark_where_the_filter_pairs(
    full: tuple[str, dict[str, Any], Path],
) -> None:
    found = full[1]["figures"]["heatmap"]
    assert found["prompt_tokens"] > 0, "the task's problems are generated: prompts are known"
    for side in ("K at the later position", "V"):
        distances = found["distances"][side]
        for aligned, other in zip(distances["aligned_mean"], distances["other_mean"], strict=True):
            assert aligned < 0.7 * other
    # In the first layer a value depends on nothing but its token.
    assert found["distances"]["V"]["aligned_mean"][0] < 1e-3


def test_missing_things_are_named(full: tuple[str, dict[str, Any], Path]) -> None:
    text, summary, _ = full
    entry = table_row(summary, "table_2", "ReasonCache")["affected"]
    assert entry["text"] == "-" and "tiny_reasoner, reasoncache" in entry["missing"]
    assert "Missing (-): no server report with this figure" in text
    assert "Not run: sentence-bert" not in text
    assert "Not run: p50, p80, embedding, sentence-bert" in text


def test_an_unfinished_run_is_called_so(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "half",
        {"dense": 0.0, "reasoncache": 0.2, "random": 0.2},
        seeds=(0,),
        problems=4,
        tasks=("tiny_reasoner", "other"),
    )
    config = json.loads((run / "config.json").read_text())
    config["methods"].append("memshare")
    config["problems"] = {"tiny_reasoner": {"0": {"count": 6}}}
    write_config(run, config)
    cell = Cell(run, "tiny_reasoner", "reasoncache", 0)
    (cell.folder / "legs.jsonl").unlink()
    (cell.folder / "results.jsonl").unlink()
    (cell.folder / "timeline.jsonl").unlink()
    with (cell.folder / "responses.jsonl").open("a") as file:
        file.write('{"problem_id": "cut o')
    text, summary, _ = report(run, "--heatmap-model", "none")
    assert "**incomplete**" in text
    faults = summary["runs"][0]["incomplete"]
    assert "tiny_reasoner, reasoncache, seed 0: 4 of 6 problems answered" in faults
    assert "tiny_reasoner, reasoncache, seed 0: 0 of 4 responses graded" in faults
    assert "tiny_reasoner, reasoncache, seed 0: 4 responses in legs without a record" in faults
    assert "other, memshare, seed 0: not begun" in faults
    row = table_row(summary, "table_1", "ReasonCache")
    assert row["tiny_reasoner: accuracy"]["text"] == row["average accuracy"]["text"] == "-"
    assert row["other: accuracy"]["text"] != "-"
    assert "no grades (tiny&#95;reasoner" in text or "no grades (tiny_reasoner" in text


def test_a_resumed_cell_is_called_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"dense": 0.0, "reasoncache": 0.2}, seeds=(0,), problems=3)
    cell = Cell(run, "tiny_reasoner", "reasoncache", 0)
    first, (leg,) = cell.responses()[0], cell.legs()
    cell.append(dataclasses.replace(first, problem_id="late", leg=1))
    cell.append(dataclasses.replace(leg, leg=1, responses=1))
    text, summary, _ = report(run, "--heatmap-model", "none")
    assert (
        "tiny_reasoner, reasoncache, seed 0: stopped or resumed, so it has no throughput"
        in summary["runs"][0]["incomplete"]
    )
    for table, column in (("table_1", "tiny_reasoner: tokens/s"), ("table_2", "tokens/s")):
        entry = table_row(summary, table, "ReasonCache")[column]
        assert (entry["text"], entry["missing"]) == ("-", "resumed (tiny_reasoner, reasoncache)")
    entry = table_row(summary, "speed_against_dense", "ReasonCache")["tokens/s ratio"]
    assert entry["missing"] == "resumed (tiny_reasoner, reasoncache)"
    assert table_row(summary, "table_2", "ReasonCache")["saved, decode steps"]["text"] == "20.0%"
    assert "Missing (-): resumed" in text


def test_like_saving_is_that_at_the_end_of_a_response(tmp_path: Path) -> None:
    """Which random sharing is matched on; over decode steps it saves otherwise."""
    run = write_run(
        tmp_path / "run", {"dense": 0.0, "reasoncache": 0.2, "random": 0.13}, seeds=(0,)
    )
    path = run / "tiny_reasoner" / "random" / "seed-0" / "legs.jsonl"
    leg = json.loads(path.read_text())
    leg["report"]["totals"]["final_saving_ratio"] = 0.29
    path.write_text(json.dumps(leg) + "\n")
    _, summary, _ = report(run, "--heatmap-model", "none")
    notes = " ".join(summary["tables"]["table_2"]["notes"])
    assert "(within 10% of ReasonCache's 30.0%): Random sharing (29.0%)." in notes


def test_the_sweep_shows_the_slots_that_servers_had(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / f"kv{budget}", {"dense": 0.0}, seeds=(0,), problems=2, kv_budget=budget
        )
        for budget in (1000, 2000)
    ]
    path = runs[1] / "tiny_reasoner" / "dense" / "seed-0" / "legs.jsonl"
    leg = json.loads(path.read_text())
    path.write_text(json.dumps({**leg, "kv_slots": 1500, "cut_prompts": 3}) + "\n")
    _, summary, _ = report(*runs, "--heatmap-model", "none")
    assert list(summary["figures"]["budget_tiny-reasoner"]["tokens_per_s"]["dense"]) == [
        "1000",
        "1500",
    ]
    assert [(run["kv_budget"], run["kv_slots"]) for run in summary["runs"]] == [
        (1000, 1000),
        (2000, 1500),
    ]
    assert summary["runs"][1]["incomplete"] == [
        "tiny_reasoner, dense: a server had 1500 KV slots, not 2000",
        "tiny_reasoner, dense: 3 prompts were cut by the server",
    ]


def test_a_replay_is_cut_where_it_differs_from_the_record(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", {"dense": 0.0}, seeds=(0,), problems=3, tasks=("aime24_replay",)
    )
    cell = Cell(run, "aime24_replay", "dense", 0)
    rows = [dataclasses.replace(row, finish_reason="length") for row in cell.responses()]
    (cell.folder / "responses.jsonl").unlink()
    for row in rows:
        cell.append(row)
    # All but one are graded as the record.
    assert load([run])[0].groups["aime24_replay", "dense"].cut == 1


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run|<b>", {"dense": 0.0, "x<i>|[y](z)": 0.1}, seeds=(0,), problems=3,
        model="$\\frac{<img src=x>|", command_line="echo `id` | sh",
    )  # fmt: skip
    cell = Cell(run, "tiny_reasoner", "dense", 0)
    cell.append(Response("p", 0, HOSTILE, HOSTILE * 50, 1, 1, 0.0, None, 1.0, error=HOSTILE))
    cell.append(Response("q", 0, HOSTILE, HOSTILE, 1, 1, 0.0, 0.5, 1.0, HOSTILE))
    text, summary, _ = report(run)
    outside_code = re.sub(r"`[^`]*`", "", text)
    assert not re.search(r"<(script|img|b|i)\b", outside_code)
    assert "](http" not in outside_code and "](z)" not in outside_code
    assert "\n# heading" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        widths = {line.count("|") for line in table.splitlines()}
        assert len(widths) == 1, table
    row = table_row(summary, "requests", "Dense")
    assert row["failed attempts"]["value"] == row["never answered"]["value"] == 1
    assert "Failed attempts: 1" in text


def test_runs_with_other_budgets_make_a_sweep(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / f"kv{budget}", {"dense": 0.0, "reasoncache": saving}, seeds=(0,),
            problems=3, kv_budget=budget,
        )
        for budget, saving in ((4000, 0.2), (1000, 0.3), (16000, 0.01), (2000, 0.25))
    ]  # fmt: skip
    out = tmp_path / "out"
    text, summary, _ = report(*runs, "--out", out, "--heatmap-model", "none")
    ratios = summary["figures"]["budget_tiny-reasoner"]["ratio"]["reasoncache"]
    assert list(ratios) == ["1000", "2000", "4000", "16000"]
    assert ratios["1000"]["median"] > ratios["16000"]["median"]
    assert [run["kv_budget"] for run in summary["runs"]] == [1000, 2000, 4000, 16000]
    assert (out / "budget_tiny-reasoner.png").is_file()
    assert "### KV budget" in text


def test_an_empty_run_gives_a_report(tmp_path: Path) -> None:
    run = tmp_path / "empty"
    write_config(run, {"tasks": ["t"], "methods": ["dense"], "seeds": [0]})
    text, summary, _ = report(run)
    assert summary["runs"][0]["incomplete"] == ["t, dense, seed 0: not begun"]
    assert "no run has its methods" in text and "not drawn" in text


def test_a_broken_run_is_refused_by_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", {"dense": 0.0}, seeds=(0,), problems=2)
    path = run / "tiny_reasoner" / "dense" / "seed-0" / "legs.jsonl"
    path.write_text("{}\n")
    assert main([str(run)]) == 1
    assert f"{path}:1:" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 1
    with pytest.raises(SystemExit):
        main([str(run), "--heatmap-model", str(tmp_path / "no model")])
    assert "--heatmap-model must be a folder or none" in capsys.readouterr().err


def test_a_repeated_answer_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"dense": 0.0}, seeds=(0,), problems=2)
    cell = Cell(run, "tiny_reasoner", "dense", 0)
    first = cell.responses()[0]
    cell.append(first)
    cell.append(Response(first.problem_id, 0, "", "", 1, 0, 0.0, None, 1.0, error="late"))
    group = load([run])[0].groups["tiny_reasoner", "dense"]
    assert group.cells[0].speed.responses == len(group.responses) == 2
    assert (group.failed, group.unanswered) == (1, 0)
    assert not any(response.text for response in group.responses.values())
