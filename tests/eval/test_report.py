# SPDX-License-Identifier: Apache-2.0
"""Tests reports of complete, unfinished, empty and hostile runs, and the figures and intervals in reports."""

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import image
from scipy import stats

from eval import command
from eval.measures.accuracy import Estimate, Key, compare, differ, keyed, mean
from eval.measures.figures import figures
from eval.report.__main__ import Options, work
from eval.report.tables import load, majority
from eval.runs.folder import CONFIG, Cell, read_config, write_json
from eval.tiny_reasoner import task as reasoner
from tests.eval.peer import moment, response, result, served


def write_run(
    run: Path,
    methods: dict[str, float],
    tasks: Sequence[str] = ("tiny_reasoner",),
    seeds: Sequence[int] = (0,),
    problems: int = 3,
    **config: Any,
) -> Path:
    """Writes a run. ``methods``: name -> share of slots saved. Times are shorter by about this share."""
    asked = {"tasks": list(tasks), "methods": list(methods), "seeds": list(seeds)}
    asked |= {"kv_budget": 4000, "decode_log_interval": 10}
    where = {"machine": {"cpu": "A CPU", "cores": 2}, "date": "2026-01-02T03:04:05+00:00"}
    where |= {"model": "tiny_reasoner", "versions": {"commit": "0123456789abcdef"}}
    write_json(run / CONFIG, {**asked, **where, **config})
    for task, seed, (method, saving) in itertools.product(tasks, seeds, methods.items()):
        fill(Cell(run, task, method, seed), problems, saving)
    return run


def fill(cell: Cell, problems: int, saving: float, **answered: Any) -> None:
    """Writes a cell (the records of a task, method and seed). All answers but the first are right."""
    draw = random.Random(f"{cell.method}{cell.seed}")
    results = []
    rows = []
    for i, problem in enumerate(reasoner.generate(cell.seed, problems)):
        name = f"tiny_reasoner-{cell.seed}-{i}"
        length = len(problem.response.split(" "))
        times = {"started": 0.0, "first_token": draw.random(), "ended": 1 + 0.01 * length}
        row: dict[str, Any] = {"text": problem.response, "output_tokens": length, **times}
        rows.append(response(name, **row, **answered))
        results.append(result(name, i >= 1, "error" if problem.error else "clean", length))
    # A method that saves slots gets 40 more steps, so that the report draws timelines of unequal length.
    used = [min(4000, 200 * step) for step in range(800 + 40 * (saving > 0))]
    timeline = [moment(i, 1 + i // 4, n, int(saving * n)) for i, n in enumerate(used)]
    totals = {"memory_saving_ratio": saving, "polls": 40}
    totals |= {"final_saving_ratio": 1.5 * saving, "requests_finished": problems}
    seconds = 10 * (1 - saving) * draw.uniform(0.95, 1.05)
    tokens = sum(row.output_tokens for row in results)
    told = {"output_tokens": tokens, "responses": problems, "seconds": seconds}
    cell.write(rows, timeline, served(totals if saving else None, **told))
    cell.write_results(results)


def report(*arguments: str | Path) -> tuple[str, dict[str, Any], Path]:
    """Makes a report; returns its Markdown, tables and folder."""
    command.run(Options, work, [*map(str, arguments)])
    out = Path(arguments[-1] if "--out" in arguments else Path(arguments[0]) / "report")
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return (out / "REPORT.md").read_text(encoding="utf-8"), summary["tables"], out


def row_of(tables: dict[str, Any], table: str, method: str) -> dict[str, str]:
    return next(row for row in tables[table] if row["method"] == method)


def test_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    methods = {"dense": 0.0, "random": 0.21, "reasoncache": 0.2}
    run = write_run(tmp_path / "full", methods, seeds=(0, 1), problems=8)
    text, tables, out = report(run)
    own = row_of(tables, "methods", "reasoncache")
    assert (own["saved, decode steps"], own["saved, end of response"]) == ("20.0%", "30.0%")
    assert own["accuracy"].startswith("0.875 (") and own["affected"] == "-"
    assert [row["method"] for row in tables["methods"]] == ["dense", "reasoncache", "random"]
    cells = [[Cell(run, "tiny_reasoner", m, s) for s in (0, 1)] for m in ("reasoncache", "dense")]
    told = [[cell.served() for cell in row] for row in cells]
    speeds = [[one.output_tokens / one.seconds for one in row] for row in told]
    assert own["tokens/s"].startswith(f"{np.median(speeds[0]):.1f} (")
    pair = row_of(tables, "against_dense", "reasoncache")
    ratio = np.median(np.divide(speeds[0], speeds[1]))
    assert pair["tokens/s ratio"].startswith(f"{ratio:.2f}")
    assert (pair["pairs"], pair["McNemar p"]) == ("16", "1")
    assert pair["response length ratio"] == "1.000 (1.000 to 1.000)"
    assert pair["accuracy kept"].startswith("1.000 (0.")
    assert pair["as dense"] == "1.000"
    assert "commit 0123456789ab" in text and "A CPU, 2 cores, 2026-01-02T03" in text
    pictures = set(re.findall(r"\]\((.+?\.png)\)", text))
    assert pictures == {"accuracy_tiny_reasoner.png", "timeline_tiny_reasoner.png"}
    for name in pictures:
        pixels = image.imread(out / name)
        assert min(pixels.shape[:2]) > 200 and pixels.std() > 0.02, f"{name} is blank"


def test_one_file_holds_tables_and_pictures(tmp_path: Path) -> None:
    """The HTML file needs no other file. Text from the run's files is escaped."""
    hostile: Any = dict(model="<script>a</script>", command_line="b `<script>`\n</code><script>")
    run = write_run(tmp_path / "run", {"dense": 0.0, "<img src=x>": 0.2}, **hostile)
    right = [result(f"tiny_reasoner-0-{i}", True, "clean", 9) for i in range(20)]
    Cell(run, "tiny_reasoner", "dense", 0).write_results(right)
    _, _, out = report(run)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("<table>") == 3 and ">dense</td>" in page
    assert re.findall("<img .*?src=.{15}", page) == [
        f'<img alt="{caption}, tiny_reasoner" src="data:image/png'
        for caption in ("Accuracy against slots saved", "KV slots and running requests over time")
    ]
    assert "<script" not in page and "&lt;script&gt;" in page


SHARES = {"dense": 0.0, "reasoncache": 0.2}


def test_an_unfinished_run_has_gaps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "half", SHARES, ("tiny_reasoner", "other"), problems=4)
    config = read_config(run)
    write_json(run / CONFIG, {**config, "methods": [*config["methods"], "memshare"]})
    cell = Cell(run, "tiny_reasoner", "reasoncache", 0)
    (cell.folder / "results.jsonl").unlink()
    (Cell(run, "other", "dense", 0).folder / "server.json").unlink()
    _, tables, _ = report(run)
    row = row_of(tables, "methods", "reasoncache")
    assert row["task"] == "tiny_reasoner" and row["accuracy"] == "-"
    counts = row_of(tables, "requests", "reasoncache")
    assert (counts["answered"], counts["graded"]) == ("4", "0")
    assert "memshare" not in {row["method"] for row in tables["methods"]}
    assert [row["method"] for row in tables["methods"] if row["task"] == "other"] == ["reasoncache"]


def test_a_replay_is_cut_where_it_differs_from_the_record(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"dense": 0.0}, ("aime24_replay",))
    cell = Cell(run, "aime24_replay", "dense", 0)
    fill(cell, 3, 0.0, finish_reason="length")
    # All three answers have finish reason "length". Only the wrong one counts as cut: two equal the record.
    assert list(load([run]).cells["cut"]) == [1]


def test_nothing_to_read_is_told(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit, match=f"eval.report: error: {tmp_path}"):
            report(tmp_path)
        write_json(tmp_path / CONFIG, {"tasks": ["t"], "methods": ["dense"], "seeds": [0]})


# Hypothesis gets no deadline, because the machine may be busy with servers.
_SETTINGS = settings(deadline=None, max_examples=40)
_PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=60)


def values(*seeds: Any) -> dict[Key, float]:
    """Values by problem and seed. Each argument has the values of one seed."""
    return {(str(i), s): float(v) for s, row in enumerate(seeds) for i, v in enumerate(row)}


def limits(found: Estimate | None) -> tuple[float, float]:
    assert found is not None and found.low is not None and found.high is not None
    return found.low, found.high


@_SETTINGS
@given(st.lists(st.integers(0, 1), min_size=1, max_size=300), st.integers(1, 4))
def test_shares_have_wilsons_interval_and_copies_add_nothing(right: list[int], seeds: int) -> None:
    reference = stats.binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    for found in (mean(values(right)), mean(values(*[right] * seeds))):
        assert limits(found) == pytest.approx((reference.low, reference.high), abs=1e-12)


def test_difference_of_shares_as_published() -> None:
    """Intervals equal those of Newcombe 1998, Improved confidence intervals for the difference between binomial
    proportions based on paired data, method 10. ``cells`` counts pairs: both right, only x, only y, neither."""
    for cells, interval in {
        (36, 12, 2, 0): (0.0569, 0.3404),
        (54, 0, 0, 0): (-0.0664, 0.0664),
        (1, 97, 1, 1): (0.8737, 0.9850),
    }.items():
        x, y = np.repeat([(1, 1), (1, 0), (0, 1), (0, 0)], cells, axis=0).T
        assert limits(differ(values(x), values(y))) == pytest.approx(interval, abs=2e-4)


@pytest.mark.parametrize("share", [0.7, 0.98])
def test_intervals_cover_the_truth_with_seeds_that_resemble_each_other(share: float) -> None:
    draw = np.random.default_rng(7)
    problems = 60
    seeds = 3
    repeats = 300
    hits = {"mean": 0, "difference": 0}
    # A problem has the same chance of a right answer in x and y and for all seeds.
    for _ in range(repeats):
        chance = draw.beta(3.0 * share, 3.0 * (1 - share), problems)
        x, y = (values(*(draw.random((seeds, problems)) < chance)) for _ in range(2))
        for name, found, truth in (("mean", mean(x), share), ("difference", differ(x, y), 0)):
            low, high = limits(found)
            hits[name] += low <= truth <= high
    # The bound is three standard errors of 300 repeats below 95%.
    assert all(count / repeats > 0.912 for count in hits.values()), hits


def test_what_has_no_value_or_no_interval() -> None:
    assert mean({}) is None and differ({}, {}) is None
    assert (single := mean(values([3.5]))) and single.low is None


@_SETTINGS
@given(_PAIRS)
def test_two_sides(rows: list[tuple[int, int]]) -> None:
    sides = [keyed({0: [result(str(i), bool(r[s])) for i, r in enumerate(rows)]}) for s in (0, 1)]
    found = compare(*sides)
    assert found is not None and found.pairs == len(rows)
    b = found.only_dense
    c = found.only_method
    assert (b, c) == (rows.count((0, 1)), rows.count((1, 0)))
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c)
    assert found.p_value == pytest.approx(min(1.0, 2 * tail))
    assert found.difference.value == pytest.approx((c - b) / found.pairs)
    assert (found.kept is None) == (not any(row[1] for row in rows))
    x, y = (values([row[i] for row in rows]) for i in (0, 1))
    assert differ(x, y) == found.difference
    low, high = limits(found.difference)
    assert -1 <= low <= found.difference.value <= high <= 1
    assert low < high, "never certain"
    assert limits(differ(y, x))[0] == pytest.approx(-high)


def test_only_common_problems_and_seeds_are_compared() -> None:
    dense = keyed({0: [result("a", True), result("b", True)], 1: [result("a", True)]})
    found = compare(keyed({0: [result("a", False), result("c", True)]}), dense)
    assert found is not None and found.pairs == 1 and found.difference.value == -1
    assert compare(keyed({0: [result("z", True)]}), dense) is None


def test_speed_and_memory_of_a_cell() -> None:
    rows = [response("a"), response("d", output_tokens=1000, error="timed out")]
    rows += [response("b", started=0.0, first_token=2.0, ended=2.0, output_tokens=1)]
    rows += [response("c", first_token=None, output_tokens=0)]
    rows += [response("e", first_token=1.25, ended=1.35)]
    timeline = [moment(0, running=2, used=5), moment(1, running=4, used=9)]
    found = figures(rows, served(), timeline)
    assert (found.failed, found.mean_running, found.running_while_waiting) == (1, 3, None)
    timeline.append(moment(2, running=6, used=7, queued=1))
    assert figures(rows, served(), timeline).running_while_waiting == 6
    assert (found.peak_slots, found.mean_slots) == (9, 7)
    assert found.ttft_p50 == pytest.approx(0.75)
    assert found.ttft_p99 == pytest.approx(np.percentile([0.5, 2.0, 0.75], 99))
    # Response b has one token, so it has no time between tokens.
    assert found.tpot_p50 == pytest.approx((0.1 + 0.01) / 2)
    nothing = figures([], served(seconds=0.0, output_tokens=0), [])
    assert nothing.tokens_per_s is nothing.ttft_p50 is nothing.mean_running is None


def test_a_majority_is_of_one_problem_and_its_answer() -> None:
    answers: dict[str, str | None] = {
        "p.0": "4", "p.1": "3", "p.2": "3", "q.0": "4", "q.1": "5", "r.0": "4",
    }  # fmt: skip
    answers |= {"s.0": None, "s.1": None, "s.2": "4"}
    found = [dataclasses.replace(result(at, x == "4"), extracted=x) for at, x in answers.items()]
    assert majority(found) == pytest.approx(2 / 4)
