# SPDX-License-Identifier: Apache-2.0
"""Reports of run folders, good, thin, broken and hostile; intervals, speed and memory."""

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
from eval.report.tables import load
from eval.runs.folder import Cell, Response, read_config, write_config
from eval.tiny_reasoner import task as reasoner
from tests.eval.peer import leg, moment, response, result

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
    results = []
    for i, problem in enumerate(reasoner.generate(cell.seed, problems)):
        name, length = f"tiny_reasoner-{cell.seed}-{i}", len(problem.response.split(" "))
        times = {"started": 0.0, "first_token": draw.random(), "ended": 1 + 0.01 * length}
        cell.append(response(name, text=problem.response, output_tokens=length, **times))
        results.append(result(name, i >= 1, "error" if problem.error else "clean", length))
    cell.write_results(results)
    used = [min(4000, 200 * step) for step in range(40)]
    cell.append(*(moment(i, 1 + i // 4, n, int(saving * n)) for i, n in enumerate(used)))
    totals = {"memory_saving_ratio": saving, "polls": 40}
    totals |= {"final_saving_ratio": 1.5 * saving, "requests_finished": problems}
    command = ["serve", *(["--enable-reasoncache"] if saving else [])]
    seconds = 10 * (1 - saving) * draw.uniform(0.95, 1.05)
    tokens = sum(row.output_tokens for row in results)
    row = {"output_tokens": tokens, "responses": problems, "command": command}
    cell.append(leg(0, totals if saving else None, seconds=seconds, **row))


def report(*arguments: str | Path) -> tuple[str, dict[str, Any], Path]:
    """Markdown, tables and folder."""
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


SHARES = {"dense": 0.0, "reasoncache": 0.2}


def test_an_unfinished_run_has_gaps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "half", SHARES, ("tiny_reasoner", "other"), problems=4)
    config = read_config(run)
    write_config(run, {**config, "methods": [*config["methods"], "memshare"]})
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
    run = write_run(tmp_path / "run", SHARES)
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
    savings = [(slots, {"dense": 0.0, "reasoncache": share}) for slots, share in budgets]
    runs = [write_run(tmp_path / f"kv{n}", methods, kv_budget=n) for n, methods in savings]
    cell = Cell(runs[3], "tiny_reasoner", "dense", 0)
    (had,) = cell.legs()
    (cell.folder / "legs.jsonl").unlink()
    cell.append(dataclasses.replace(had, kv_slots=1500))
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
    cell.append(*rows)
    # All but one are graded as the record.
    assert list(load([run]).cells["cut"]) == [1]


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    named: dict[str, Any] = {"model": "$\\frac{<img src=x>|", "command_line": "echo `id` | sh"}
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


def test_nothing_to_read_is_told(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(SystemExit, match=f"eval.report: error: {tmp_path}"):
            report(tmp_path)
        write_config(tmp_path, {"tasks": ["t"], "methods": ["dense"], "seeds": [0]})


# The machine may be busy with servers.
_SETTINGS = settings(deadline=None, max_examples=40)
_PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=60)


def values(*seeds: Any) -> dict[Key, float]:
    """Values of the same problems, seed by seed."""
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


def test_independent_seeds_narrow_the_interval() -> None:
    draw = np.random.default_rng(1)
    many = limits(mean(values(*draw.integers(0, 2, (4, 200)))))
    one = limits(mean(values(draw.integers(0, 2, 200))))
    assert 0.45 < (many[1] - many[0]) / (one[1] - one[0]) < 0.65


def test_difference_of_shares_as_published() -> None:
    """Newcombe 1998, Improved confidence intervals for the difference between binomial proportions
    based on paired data, method 10; cells are both, only x, only y, neither."""
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
    problems, seeds, repeats = 60, 3, 300
    hits = {"mean": 0, "difference": 0}
    # Each problem has its own chance of being right, the same for both arms.
    for _ in range(repeats):
        chance = draw.beta(3.0 * share, 3.0 * (1 - share), problems)
        x, y = (values(*(draw.random((seeds, problems)) < chance)) for _ in range(2))
        for name, found, truth in (("mean", mean(x), share), ("difference", differ(x, y), 0)):
            low, high = limits(found)
            hits[name] += low <= truth <= high
    # Three standard errors below 95%.
    assert all(count / repeats > 0.912 for count in hits.values()), hits


def test_other_values_have_students_interval() -> None:
    x, y = [3.0, 5.5, 9.0, 4.0], [2.0, 5.0, 7.0, 4.5]
    both = differ(values(x), values(y)), stats.ttest_rel(x, y)
    for found, test in ((mean(values(x)), stats.ttest_1samp(x, 0)), both):
        reference = test.confidence_interval()
        assert limits(found) == pytest.approx((reference.low, reference.high))
    assert mean({}) is None and differ({}, {}) is None
    single = mean(values([3.5]))
    assert single is not None and single.low is None


@_SETTINGS
@given(_PAIRS)
def test_two_sides(rows: list[tuple[int, int]]) -> None:
    sides = [keyed({0: [result(str(i), bool(r[s])) for i, r in enumerate(rows)]}) for s in (0, 1)]
    found = compare(*sides)
    assert found is not None and found.pairs == len(rows)
    b, c = found.only_dense, found.only_method
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


def test_speed_of_a_leg_that_went_to_its_end() -> None:
    rows = [response("a"), response("d", output_tokens=1000, error="timed out")]
    rows += [response("b", started=0.0, first_token=2.0, ended=2.0, output_tokens=1)]
    rows += [response("c", first_token=None, output_tokens=0)]
    rows += [response("e", first_token=1.25, ended=1.35)]
    # Beside it one that was stopped and had answered nothing yet.
    legs = [leg(), leg(2, seconds=30, output_tokens=0, responses=0, ended=False)]
    found = figures(rows, legs, [moment(0, running=2), moment(1, running=4)])
    assert (found.tokens_per_s, found.problems_per_min) == (10, 24)
    assert (found.resumed, found.failed, found.mean_running) == (False, 1, 3)
    assert found.ttft_p50 == pytest.approx(0.75)
    assert found.ttft_p99 == pytest.approx(np.percentile([0.5, 2.0, 0.75], 99))
    # One token has no time between tokens.
    assert found.tpot_p50 == pytest.approx((0.1 + 0.01) / 2)
    assert found.response_tokens == pytest.approx((11 + 1 + 0 + 11) / 4)


def test_a_resumed_cell_has_no_throughput() -> None:
    """Tokens of what was in flight when a leg was stopped are lost, their time is not."""
    one, both = [response("a")], [response("a"), response("b", leg=1)]
    stopped, other = (leg(number, ended=False) for number in (0, 1))
    for rows, legs in ((both, [leg(), leg(1)]), (both, [leg(), other]), (one, [stopped])):
        found = figures(rows, legs, [])
        assert found.tokens_per_s is found.problems_per_min is None
        assert found.resumed and found.tpot_p50 is not None
    killed, nothing = figures(one, [], []), figures([], [], [])
    assert killed.tokens_per_s is None and not killed.resumed
    assert nothing.tokens_per_s is nothing.ttft_p50 is nothing.mean_running is None


def test_saving_weighs_legs_by_what_they_counted() -> None:
    names = ["memory_saving_ratio", "polls", "final_saving_ratio", "requests_finished"]
    names += ["affected_ratio", "finished_positions"]
    counts = ((0.1, 10, 0.2, 1, 0.5, 100), (0.3, 30, 0.4, 3, 0.1, 300))
    legs = [leg(i, dict(zip(names, row, strict=True))) for i, row in enumerate(counts)]
    found = figures([], legs, [moment(0, used=5), moment(1, used=9)])
    shares = (found.saving, found.final_saving, found.affected)
    assert shares == pytest.approx((0.25, 0.35, 0.2))
    assert (found.peak_slots, found.mean_slots) == (9, 7)
    assert (found.retractions, found.leaked_slots) == (2, 0)


def test_what_a_server_does_not_report_is_unknown() -> None:
    """Stock saves nothing; of a given server, or with a broken figure, nothing is known."""
    flags = ["serve", "--enable-reasoncache"]
    dead, answered = (leg(1, command=flags, responses=count) for count in (0, 1))
    given, broken = leg(command=[], leaked_slots=None), {"memory_saving_ratio": math.nan}
    whole = leg(0, {"memory_saving_ratio": 0.1, "polls": 10})
    broken_leg = leg(0, {**broken, "polls": 1})
    for one, saving in ((leg(), 0.0), (given, None), (broken_leg, None), (whole, 0.1)):
        assert figures([], [one], []).saving == saving
        # A leg whose server died before it answered says nothing about the others.
        assert figures([], [one, dead], []).saving == saving
        assert figures([], [one, answered], []).saving is None
    assert figures([], [leg(0, {"polls": 1.0})], []).affected is None
