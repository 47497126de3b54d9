# SPDX-License-Identifier: Apache-2.0
"""``bench-policies``: what it plans, how it goes on after a stop, what its rows, table and picture say."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from matplotlib.image import imread

from eval.bench import policies, policies_runs
from eval.bench.policies import dense_row, row_of, rows, table
from eval.bench.policies_points import (
    _EMBEDDED,
    _REPLAYED,
    POLICIES,
    SAVINGS,
    Point,
    installed,
    method_of,
    points,
    prompt_points,
    timed_points,
)
from eval.bench.policies_runs import LIMIT, PIECES, Runs, carry_out, timing
from eval.measures.figures import matched_step_ms
from eval.methods import DENSE, find_method
from eval.runs.folder import Cell, Moment
from eval.runs.options import parse
from eval.tiny_reasoner import EMBEDDED_SETTINGS
from sglang_reasoncache import registry
from tests.eval.peer import leg, moment, response, result

PROBLEMS = 6


def test_every_setting_is_a_method_that_the_server_takes() -> None:
    found, left_out = points(installed(), SAVINGS)
    methods = [point.method for point in found]
    assert len(set(methods)) == len(methods)
    for point in found:
        assert find_method(point.method, EMBEDDED_SETTINGS).shares
    assert {point.policy for point in found} == set(installed())
    expected = {"reasoncache", "streamingllm", "keydiff", "random", "random_eviction"}
    assert expected <= set(installed())
    assert {point.aim for point in found if point.policy == "reasoncache"} == {0.1, 0.2}
    told = [line for line in left_out if line.startswith("reasoncache at")]
    assert len(told) == 2 and "40%" in told[0] and "60%" in told[1]


@pytest.mark.parametrize(
    ("policy", "saving", "replayed", "method"),
    [
        # Random sharing and random eviction are two things.
        ("random", 0.2, False, "random:random_ratio=0.24"),
        ("random_eviction", 0.2, False, "policy=random:budget=321:slack=8"),
        ("random", 0.9, False, "random:random_ratio=1"),
        # SnapKV saves prompts only.
        ("snapkv", 0.1, False, "policy=snapkv:share=0.5"),
        ("reasoncache+snapkv", 0.1, True, "policy=reasoncache+snapkv:share=0.5"),
        ("snapkv", 0.2, False, None),
        ("reasoncache+snapkv", 0.2, False, None),
        # A pair has its evictor's budget.
        ("keydiff", 0.4, False, "policy=keydiff:budget=214:slack=8"),
        ("reasoncache+keydiff", 0.4, False, "policy=reasoncache+keydiff:budget=214:slack=8"),
        ("reasoncache+random_eviction", 0.6, True, "policy=reasoncache+random:budget=344:slack=32"),
    ],
)
def test_settings(policy: str, saving: float, replayed: bool, method: str | None) -> None:
    found = method_of(policy, saving, _REPLAYED if replayed else _EMBEDDED)
    if method is not None:
        method = method if method.startswith("random:") else f"reasoncache:{method}"
        method += ",block=8,warmup=32" if replayed else ""
        assert find_method(method).values.get("block") == (8 if replayed else None)
    assert found == method


def test_a_budget_leaves_out_what_is_aimed_at() -> None:
    """Averaged over the steps of a request that grows from 45 positions to 580."""
    lengths = range(45, 580)
    for saving in SAVINGS:
        method = method_of("keydiff", saving)
        assert method is not None
        budget = int(method.split("budget=")[1].split(":")[0])
        left_out = sum(max(0, length - budget) for length in lengths)
        assert left_out / sum(lengths) == pytest.approx(saving, abs=0.005)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--policies", "keydif"], "no policy 'keydif'; there are reasoncache"),
        (["--policies", "keydiff"], "no policy 'keydiff'"),
        (["--policies", "reasoncache+nothing"], "no policy 'nothing'"),
        (["--policies", "keydiff+reasoncache"], "no policy 'keydiff+reasoncache'"),
        (["--policies", "keydiff,keydiff"], "none twice"),
        (["--saved", "0.2,1.2"], "above 0 and below 1, got 1.2"),
        (["--saved", "half"], "must be numbers"),
        (["--timed-saved", "0.2,1"], "above 0 and below 1, got 1"),
        (["--timed-saved", "all"], "must be numbers"),
        (["--budgets", "600"], "above 0 and below 600, got 600"),
        (["--budgets", "many"], "must be numbers"),
        (["--problems", "1"], "at least 2, got 1"),
        (["--rounds", "-1"], "at least 0, got -1"),
    ],
)
def test_bad_commands_are_refused(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if given == ["--policies", "keydiff"]:
        # In a version that does not have it.
        others = {name: at for name, at in registry.BUILT_IN.items() if name != "keydiff"}
        monkeypatch.setattr(registry, "BUILT_IN", others)
        assert "keydiff" not in installed() and "random_eviction" in installed()
    with pytest.raises(SystemExit) as stopped:
        policies.parse(["traces", *given])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_a_plan_tells_settings_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["traces", "--out", str(tmp_path), "--plan", "--policies", "reasoncache,keydiff,random"]
    assert policies.main([*argv, "--saved", "0.1,0.4"]) == 0
    told = capsys.readouterr().out
    assert "6 runs of" in told and "2 on replays" in told
    assert "left out: reasoncache at 40%" in told
    assert "keydiff at 40%: reasoncache:policy=keydiff:budget=214:slack=8" in told
    assert "keydiff at 20%: reasoncache:policy=keydiff:budget=833:slack=32" in told
    options = policies.parse([*argv, "--rounds", "0"])
    assert options.minutes()[0] > 0 == options.minutes()[1]
    assert list(tmp_path.iterdir()) == []
    # A setting that two savings share is run once.
    options = policies.parse(["traces", "--policies", "reasoncache", "--saved", "0.19,0.2"])
    assert len(options.points) == 2
    assert [methods for _, methods in options.asked] == [[DENSE, "reasoncache:percentile=80"]]


def test_long_prompts_are_kept_within_a_budget_block_by_block(tmp_path: Path) -> None:
    argv = ["traces", "--out", str(tmp_path), "--policies", "keydiff,random_eviction,l2norm"]
    assert policies.parse(argv).prompts == []
    options = policies.parse([*argv, "--budgets", "384,150"])
    assert [(point.policy, point.aim) for point in options.prompts] == [
        *(("keydiff", pytest.approx(0.36)), ("keydiff", 0.75)),
        *(("random_eviction", pytest.approx(0.36)), ("random_eviction", 0.75)),
    ]
    for point in options.prompts:
        assert find_method(point.method, EMBEDDED_SETTINGS).shares
    told = "keydiff:budget=384:prompt=true:slack=0:recent=1"
    assert options.prompts[0].method == f"reasoncache:policy={told}"
    told = "snapkv:budget=128:prompt=true"
    assert prompt_points(["snapkv"], [128])[0].method == f"reasoncache:policy={told}"
    assert [len(methods) for _, methods in options.asked] == [13, 5]
    command = options.long_runs.command("dense")
    assert "tiny_reasoner_long" in command and "chunked-prefill-size 128" in " ".join(command)
    filled(options.long_runs, options.prompts[0])
    policies.write(options, {})
    result = json.loads((tmp_path / "policies.json").read_text())
    assert result["rows"] == [] and result["prompt_dense"]["accuracy"] == 1.0
    assert [row["policy"] for row in result["prompt_rows"]] == ["keydiff"]
    assert "Long prompts under a budget" in (tmp_path / "policies.md").read_text()


def test_replays_measure_a_policy_where_it_gets_to() -> None:
    assert len(set(PIECES)) == len(PIECES)
    asked = ["reasoncache+keydiff", "snapkv", "reasoncache", "random"]
    found = timed_points(asked, [0.2, 0.4])
    chosen = found[0.2]
    assert [point.policy for point in chosen] == ["reasoncache+keydiff", "snapkv", "reasoncache"]
    assert [point.aim for point in chosen] == [0.2, 0.1, 0.2]
    # Sharing gets to where it was measured already.
    assert [(point.policy, point.aim) for point in found[0.4]] == [("reasoncache+keydiff", 0.4)]
    groups = policies_runs.groups([*chosen, *chosen[:1]])
    assert [len(group) for group in groups] == [3, 1]


@dataclasses.dataclass(frozen=True)
class Scripted(Runs):
    """Runs whose command is a script that leaves what a run leaves."""

    script: str = ""

    def command(self, method: str) -> list[str]:
        words = [str(self.folder(method)), self.task, method, str(self.problems)]
        return [sys.executable, "-c", self.script, *words]


ANSWERS = """
import pathlib, sys
from eval.runs.folder import Cell
from tests.eval.peer import response, result
home, task, method, problems = pathlib.Path(sys.argv[1]), *sys.argv[2:]
started = home.parents[1] / "started"
started.mkdir(exist_ok=True)
(started / f"{len(list(started.iterdir()))}-{method}").touch()
if method == "broken":
    sys.exit("the server died")
cell, names = Cell(home, task, method, 0), [str(i) for i in range(int(problems))]
cell.append(*map(response, names))
cell.write_results(result(name, True) for name in names)
"""


def test_only_what_is_not_whole_is_run_and_failures_stop_nothing(tmp_path: Path) -> None:
    runs = Scripted(tmp_path / "home", PROBLEMS, script=ANSWERS)
    said: list[str] = []
    failed = carry_out(runs, ["dense", "broken", "a:b=c,d=1"], 2, said.append)
    assert failed == {"broken": "the server died"}
    assert runs.whole("dense") and runs.whole("a:b=c,d=1") and not runs.whole("broken")
    assert len(said) == 3 and "accuracy 1.000" in " ".join(said)

    # One answer is missing, as after a kill: that run alone goes on.
    path = runs.cell("dense").folder / "responses.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert not runs.whole("dense")
    assert carry_out(runs, ["dense", "a:b=c,d=1"], 1, said.append) == {}
    started = sorted(path.name.partition("-")[2] for path in (tmp_path / "started").iterdir())
    assert started == ["a:b=c,d=1", "broken", "dense", "dense"]


def test_runs_end_with_the_bench(tmp_path: Path) -> None:
    script = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600 * ('slow' in sys.argv))"
    runs = Scripted(tmp_path, PROBLEMS, script=script)
    logs = runs.folder("slow") / policies_runs.LOG

    def say(_: str) -> None:
        deadline = time.monotonic() + 60
        while not logs.read_text().strip():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(runs, ["slow", "quick"], 2, say)
    assert not psutil.pid_exists(int(logs.read_text()))


def test_a_method_has_a_folder_and_a_command_of_its_own(tmp_path: Path) -> None:
    runs = Runs(tmp_path, PROBLEMS)
    methods = [point.method for point in points(installed(), SAVINGS)[0]] + [DENSE]
    assert len({runs.folder(method) for method in methods}) == len(methods)
    for method in methods:
        options = parse(runs.command(method)[3:]).options
        assert options is not None and options.methods == (method,)
        assert options.limit == PROBLEMS and "reasoncache_cpu" in options.server_flags


def fill(
    cell: Cell,
    right: list[bool],
    totals: dict[str, float],
    running: int = 4,
    rate: float = 100.0,
    **parts: Any,
) -> None:
    names = [f"p{i}" for i in range(len(right))]
    cell.append(*(response(name, output_tokens=50, ended=500 / rate) for name in names))
    cell.write_results([result(name, ok) for name, ok in zip(names, right, strict=True)])
    cell.append(*(moment(step, running, rate=rate) for step in range(20)))
    command = ["serve", *(["--enable-reasoncache"] if totals else [])]
    counts = {"polls": 20, "requests_finished": len(right), **totals}
    tokens, report = 50 * len(right), {"totals": counts, **parts} if totals else {}
    counted = leg(seconds=tokens / rate, output_tokens=tokens, responses=len(right))
    cell.append(dataclasses.replace(counted, report=report, command=command))


def filled(runs: Runs, point: Point, totals: dict[str, float] | None = None, **parts: Any) -> Runs:
    fill(runs.cell(DENSE), [True] * PROBLEMS, {})
    saved = {"memory_saving_ratio": 0.17, "final_saving_ratio": 0.19}
    fill(runs.cell(point.method), [True] * 4 + [False] * 2, saved | (totals or {}), **parts)
    return runs


def test_a_row_says_what_was_counted_and_not_what_was_set(tmp_path: Path) -> None:
    point = Point("keydiff", 0.2, str(method_of("keydiff", 0.2)))
    runs = filled(Runs(tmp_path, PROBLEMS), point)
    row = row_of(point, runs, {})
    assert (row["policy"], row["saved"], row["aim"]) == ("keydiff", 0.17, 0.2)
    assert row["accuracy"] == pytest.approx(4 / 6)
    assert row["accuracy_difference"] == pytest.approx(-2 / 6)
    assert 0.1 < row["accuracy_error"] < 0.5
    assert (row["only_dense_right"], row["only_policy_right"]) == (2, 0)
    assert row["throughput_ratio"] is None and row["reads_saved"] is None
    assert dense_row(runs)["accuracy"] == 1.0


def test_selection_saves_reads_and_no_memory(tmp_path: Path) -> None:
    point = Point("quest", 0.4, str(method_of("quest", 0.4)))
    counted = {"positions_held": 1000, "positions_read": 620}
    runs = filled(Runs(tmp_path, PROBLEMS), point, {"memory_saving_ratio": 0.0}, selection=counted)
    assert any(word.endswith("--page-size 16") for word in runs.command(point.method))
    row = row_of(point, runs, {})
    assert (row["saved"], row["reads_saved"]) == (0.0, 0.38)


def replayed(home: Path, method: str, seed: int, **values: float) -> Cell:
    cell = Cell(home, policies_runs.TASK, method, seed)
    saving = {"memory_saving_ratio": 0.2, "scheduler_seconds": 0.1, "decode_steps": 200}
    fill(cell, [True] * LIMIT, {} if method == DENSE else saving, **values)  # type: ignore[arg-type]
    return cell


def test_throughput_is_the_median_of_rounds_and_steps_are_compared_at_equal_batches(
    tmp_path: Path,
) -> None:
    dense = [replayed(tmp_path, DENSE, seed, rate=100.0) for seed in range(2)]
    mine = [replayed(tmp_path, "x", seed, rate=rate) for seed, rate in enumerate((120.0, 160.0))]
    found = timing(mine, dense)
    assert found is not None and found["throughput_ratios"] == pytest.approx([1.2, 1.6])
    assert found["throughput_ratio"] == pytest.approx(1.4)
    # 4 requests at 100 tokens/s are 40 ms a step; 120 and 160 are 33.3 and 25.
    assert found["dense_step_ms"] == pytest.approx(40)
    assert found["step_ms"] == pytest.approx((1000 * 4 / 120 + 25) / 2)
    assert found["scheduler_ms"] == pytest.approx(0.5)
    assert (found["saved"], found["reproduced"], found["leaked_slots"]) == (0.2, 1.0, 0)


def test_batches_that_only_one_server_had_do_not_count() -> None:
    def line(running: int, ms: float) -> Moment:
        return moment(0, running, rate=1000 * running / ms)

    theirs = [line(4, 10)] * 10 + [line(2, 8)] * 6
    mine = [line(6, 30)] * 50 + [line(4, 12)] * 5 + [line(2, 9)] * 30
    expected = ((5 * 12 + 6 * 9) / 11, (5 * 10 + 6 * 8) / 11)
    assert matched_step_ms(mine, theirs) == pytest.approx(expected)
    for other in ([line(6, 30)] * 50, [line(4, 12)] * 4, []):
        assert matched_step_ms(other, theirs) is None


def test_a_round_that_was_stopped_half_way_is_measured_anew(tmp_path: Path) -> None:
    whole, half = (replayed(tmp_path, method, 0) for method in ("whole", "half"))
    (half.folder / "legs.jsonl").unlink()
    for cell in (whole, half, Cell(tmp_path, policies_runs.TASK, "never", 0)):
        policies_runs._forget_half(cell)
    assert whole.folder.is_dir() and not half.folder.exists()
    assert timing([half], [whole]) is None


def test_results_are_written_from_what_there_is(tmp_path: Path) -> None:
    argv = ["traces", "--out", str(tmp_path), "--problems", str(PROBLEMS), "--jobs", "1"]
    options = policies.parse([*argv, "--policies", "reasoncache,keydiff", "--saved", "0.2,0.4"])
    policies.write(options, {})
    assert json.loads((tmp_path / "policies.json").read_text())["rows"] == []

    for point in options.points[:2]:
        filled(options.runs, point)
    replays = tmp_path / "replays"
    dense = [replayed(replays, DENSE, 0, rate=100.0)]
    timed = timing([replayed(replays, "x", 0, rate=150.0)], dense)
    assert timed is not None
    policies.write(options, {("keydiff", 0.2): timed})
    result = json.loads((tmp_path / "policies.json").read_text())
    assert [(row["policy"], row["aim"], row["throughput_ratio"]) for row in result["rows"]] == [
        *(("reasoncache", 0.2, None), ("keydiff", 0.2, pytest.approx(1.5)))
    ]
    [one] = result["replays"]
    assert (one["policy"], one["aim"], one["step_ms"]) == ("keydiff", 0.2, 1000 * 4 / 150)
    assert result["left_out"] == options.left_out != []
    text = (tmp_path / "policies.md").read_text()
    [line] = [[cell.strip() for cell in x.split("|")] for x in text.split("\n") if "keydiff" in x]
    assert line[1:7] == ["0.200", "keydiff", "0.170", "0.190", "0.667", "-0.333"]
    assert line[9] == "1.500" and "Left out: reasoncache at 40%" in text
    assert imread(tmp_path / "policies.png").shape[0] > 300


def test_the_table_goes_by_saving_and_then_by_policy(tmp_path: Path) -> None:
    names, runs = [*POLICIES[:5], "reasoncache+new"], Runs(tmp_path, PROBLEMS)
    chosen = [Point(name, aim, f"{name}{aim}") for name in reversed(names) for aim in (0.4, 0.1)]
    assert rows(chosen, runs, {}) == []
    for point in chosen:
        filled(runs, point)
    dense = {"accuracy": None, "accuracy_error": None, "problems": 0}
    text = table(rows(chosen, runs, {}), dense, "Title").split("\n")
    cells = [[cell.strip() for cell in line.split("|")][1:3] for line in text[5:] if line]
    assert cells == [[aim, name] for aim in ("0.100", "0.400") for name in names]
