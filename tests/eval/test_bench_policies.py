# SPDX-License-Identifier: Apache-2.0
"""``bench-policies``: what it plans, how it goes on after a stop, what its rows, table and picture say."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from eval import command
from eval.bench import policies
from eval.bench.policies import LONG, PIECES, REPLAY, SHORT, Options, dense_row, rows, table, timing
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
from eval.measures.figures import matched_step_ms
from eval.methods import DENSE, find_method
from eval.runs.folder import Cell, Moment
from eval.runs.options import RunOptions
from eval.tiny_reasoner import EMBEDDED_SETTINGS
from sglang_reasoncache import registry
from tests.eval.peer import leg, moment, response, result

PROBLEMS = 6
LIMIT = policies._REPLAYS["limit"]


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
        (["--policies", "keydiff+reasoncache"], "no policy 'keydiff+reasoncache'"),
        (["--policies", "keydiff,keydiff"], "none twice"),
        (["--saved", "0.2,1.2"], "above 0 and below 1, got 0.2,1.2"),
        (["--budgets", "600"], "above 0 and below 600, got 600"),
        (["--problems", "1"], "at least 2, got 1"),
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
        command.parse(Options, ["traces", *given])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def asked(*words: str) -> Options:
    return command.parse(Options, ["traces", *words])


def test_a_plan_tells_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--out", str(tmp_path), "--plan", "--policies", "reasoncache,keydiff,random"]
    policies.work(asked(*argv, "--saved", "0.1,0.4"))
    told = capsys.readouterr().out
    assert "6 runs of" in told and "2 policies on replays" in told
    assert "left out: reasoncache at 40%" in told
    assert "keydiff at 40%: reasoncache:policy=keydiff:budget=214:slack=8" in told
    assert "keydiff at 20%: reasoncache:policy=keydiff:budget=833:slack=32" in told
    assert list(tmp_path.iterdir()) == []
    # A setting that two savings share is run once.
    options = asked("--plan", "--policies", "reasoncache", "--saved", "0.19,0.2", "--rounds", "0")
    policies.work(options)
    assert len(options.points) == 2 and "2 runs of" in capsys.readouterr().out


def test_long_prompts_are_kept_within_a_budget_block_by_block(tmp_path: Path) -> None:
    argv = ["--out", str(tmp_path), "--policies", "keydiff,random_eviction,l2norm"]
    assert asked(*argv).prompts == []
    options = asked(*argv, "--budgets", "384,150", "--problems", str(PROBLEMS))
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
    filled(options, options.prompts[0], task=LONG)
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
    groups = policies.groups([*chosen, *chosen[:1]])
    assert [len(group) for group in groups] == [3, 1]


def test_only_what_is_not_whole_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = asked("--out", str(tmp_path), "--problems", str(PROBLEMS))
    started: list[RunOptions] = []

    def run(what: RunOptions, folder: Path) -> bool:
        started.append(what)
        if what.methods != ("p20",):
            fill(Cell(folder, SHORT, what.methods[0], 0), [True] * PROBLEMS, {})
        return True

    monkeypatch.setattr(policies, "run", run)
    cells = [options.cell(method) for method in (DENSE, "reasoncache:policy=quest", "p20")]
    assert len({cell.run for cell in cells}) == 3
    for _ in range(2):
        assert [policies.answered(cell, PROBLEMS) for cell in cells] == [True, True, False]
    assert [what.methods[0] for what in started] == [*(cell.method for cell in cells), "p20"]
    assert started[0].limit == PROBLEMS and "reasoncache_cpu" in started[0].server_flags
    assert started[1].server_flags == (*started[0].server_flags, "--page-size", "16")
    # One answer is missing, as after a kill: that run alone goes on.
    path = cells[0].folder / "responses.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    policies.answered(cells[0], PROBLEMS)
    assert started[-1].methods == (DENSE,)


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


def filled(
    options: Options, point: Point, totals: Any = None, task: str = SHORT, **parts: Any
) -> None:
    if not options.cell(DENSE, task).results():
        fill(options.cell(DENSE, task), [True] * PROBLEMS, {})
    saved = {"memory_saving_ratio": 0.17, "final_saving_ratio": 0.19}
    cell = options.cell(point.method, task)
    fill(cell, [True] * 4 + [False] * 2, saved | (totals or {}), **parts)


def test_a_row_says_what_was_counted_and_not_what_was_set(tmp_path: Path) -> None:
    options = asked("--out", str(tmp_path))
    point = Point("keydiff", 0.2, str(method_of("keydiff", 0.2)))
    filled(options, point)
    (row,) = rows([point], options, {})
    assert (row["policy"], row["saved"], row["aim"]) == ("keydiff", 0.17, 0.2)
    assert row["accuracy"] == pytest.approx(4 / 6) == row["accuracy_ratio"]
    assert row["accuracy_difference"] == pytest.approx(-2 / 6)
    assert 0.1 < row["accuracy_error"] < 0.5 and row["length_ratio"] == 1.0
    assert (row["only_dense_right"], row["only_policy_right"]) == (2, 0)
    assert row["throughput_ratio"] is None and row["reads_saved"] is None
    assert dense_row(options.cell(DENSE))["accuracy"] == 1.0


def test_selection_saves_reads_and_no_memory(tmp_path: Path) -> None:
    options = asked("--out", str(tmp_path))
    point = Point("quest", 0.4, str(method_of("quest", 0.4)))
    counted = {"positions_held": 1000, "positions_read": 620}
    filled(options, point, {"memory_saving_ratio": 0.0}, selection=counted)
    (row,) = rows([point], options, {})
    assert (row["saved"], row["reads_saved"]) == (0.0, 0.38)


def replayed(home: Path, method: str, seed: int, **values: float) -> Cell:
    cell = Cell(home, REPLAY, method, seed)
    saving = {"memory_saving_ratio": 0.2, "scheduler_seconds": 0.1, "decode_steps": 200}
    fill(cell, [True] * LIMIT, {} if method == DENSE else saving, **values)  # type: ignore[arg-type]
    return cell


def test_throughput_is_the_median_of_rounds_and_steps_are_compared_at_equal_batches(
    tmp_path: Path,
) -> None:
    dense = [replayed(tmp_path, DENSE, seed, rate=100.0) for seed in range(2)]
    mine = [replayed(tmp_path, "x", seed, rate=rate) for seed, rate in enumerate((120.0, 160.0))]
    found = timing(mine, dense)
    assert found["throughput_ratios"] == pytest.approx([1.2, 1.6])
    assert found["throughput_ratio"] == pytest.approx(1.4)
    # 4 requests at 100 tokens/s are 40 ms a step; 120 and 160 are 33.3 and 25.
    assert found["dense_step_ms"] == pytest.approx(40)
    assert found["step_ms"] == pytest.approx((1000 * 4 / 120 + 25) / 2)
    assert found["scheduler_ms"] == pytest.approx(0.5)
    assert (found["throughput_saved"], found["reproduced"]) == (0.2, 1.0)


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
    for cell in (whole, half, Cell(tmp_path, REPLAY, "never", 0)):
        policies.forget_half(cell)
    assert whole.folder.is_dir() and not half.folder.exists()
    assert timing([half], [whole])["throughput_ratio"] is None


def test_results_are_written_from_what_there_is(tmp_path: Path) -> None:
    argv = ["--out", str(tmp_path), "--problems", str(PROBLEMS)]
    options = asked(*argv, "--policies", "reasoncache,keydiff", "--saved", "0.2,0.4")
    policies.write(options, {})
    assert json.loads((tmp_path / "policies.json").read_text())["rows"] == []

    for point in options.points[:2]:
        filled(options, point)
    replays = tmp_path / "replays"
    dense = [replayed(replays, DENSE, 0, rate=100.0)]
    timed = timing([replayed(replays, "x", 0, rate=150.0)], dense)
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
    names, options = [*POLICIES[:5], "reasoncache+new"], asked("--out", str(tmp_path))
    chosen = [Point(name, aim, f"{name}{aim}") for name in reversed(names) for aim in (0.4, 0.1)]
    assert rows(chosen, options, {}) == []
    for point in chosen:
        filled(options, point)
    dense = {"accuracy": None, "accuracy_error": None, "problems": 0}
    text = table(rows(chosen, options, {}), dense, "Title").split("\n")
    cells = [[cell.strip() for cell in line.split("|")][1:3] for line in text[5:] if line]
    assert cells == [[aim, name] for aim in ("0.100", "0.400") for name in names]
