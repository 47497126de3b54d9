# SPDX-License-Identifier: Apache-2.0
"""Tests the plan of a run (order of cells, flags of servers), its options, methods and folder, and grading."""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.methods import CANDIDATES, MethodError, find_method
from eval.runs.config import default_folder, make_config, settle_config
from eval.runs.folder import Cell, RunError, locked, read_config
from eval.runs.options import RunOptions, parse
from eval.runs.plan import Plan, Step, order, request_body, samples, sampling_seed
from eval.runs.session import grade
from eval.runs.tuning import tuned
from eval.tasks.harness import EvalTask, Source
from eval.tiny_reasoner import EMBEDDED_FLAGS, EMBEDDED_SETTINGS
from sglang_reasoncache.config import parse_settings
from sglang_reasoncache.plugin.flags import add_cli_args
from tests.eval.peer import response, served, write_rows

OPTIONS = RunOptions(tasks=("tiny_reasoner",), seeds=(0, 1), limit=3, device="cpu")
ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, *answers: int) -> str:
    rows = [{"id": i, "problem": f"{i} + 1", "answer": str(a)} for i, a in enumerate(answers)]
    return str(write_rows(path, *rows))


def test_order() -> None:
    """Every second seed runs the methods in reverse order."""
    names = ["dense", "reasoncache", "p20"]
    turned = {4: names, 5: names[::-1], 6: names}
    expected = [(task, seed, name) for task in "ab" for seed in turned for name in turned[seed]]
    steps = order("ab", [find_method(name) for name in names], [*turned])
    assert [(step.task, step.seed, step.method.name) for step in steps] == expected


def planned(task_flags: Sequence[str] = (), model: str = "m", **options: Any) -> Plan:
    asked = RunOptions(model=model, tasks=("tiny_reasoner",), limit=1, **options)
    plan = Plan(asked, {"temperature": 0.0})
    for task in plan.tasks.values():
        task.server_flags = (*task_flags,)
    return plan


def flags_of(plan: Plan, spec: str, seed: int = 0) -> list[str]:
    method = find_method(spec)
    return plan.server_flags(Step("tiny_reasoner", seed, method))


def test_flags_of_a_server() -> None:
    own = planned(["--of-task"], kv_budget=500, server_flags=("--tp", "2"), decode_log_interval=5)
    assert flags_of(own, "reasoncache") == [
        "--decode-log-interval", "5", "--allow-auto-truncate", "--stream-interval", "8",
        "--max-total-tokens", "500", "--of-task", "--tp", "2",
        *find_method("reasoncache").flags,
    ]  # fmt: skip
    # A ``--stream-interval`` of the task or of the operator replaces the default of 8.
    one = ["--stream-interval", "16"]
    other = ["--stream-interval=16"]
    for plan, own_flags in ((planned(one), one), (planned(server_flags=tuple(other)), other)):
        flags = flags_of(plan, "dense")
        assert [flag for flag in flags if flag.startswith("--stream-interval")] == own_flags[:1]
        assert flags[-len(own_flags) :] == own_flags


def test_sampling_draws_other_numbers_with_each_seed() -> None:
    """With greedy sampling a server's flags are the same for every seed; otherwise they depend on the seed."""
    plan = planned(seeds=(0, 1))
    for body, same in (({"temperature": 0.0}, True), ({"temperature": 0.6}, False), ({}, False)):
        plan.body = body
        assert (flags_of(plan, "dense", 0) == flags_of(plan, "dense", 1)) == same
        assert samples(body) != same
    seeds = {sampling_seed(seed, f"p-{i}") for seed in (0, 1) for i in range(100)}
    assert len(seeds) == 200 and all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(0, "p-1") == sampling_seed(0, "p-1")
    assert sampling_seed(0, "\ud800") >= 0


def config_of(options: RunOptions, **changes: Any) -> dict[str, Any]:
    options = dataclasses.replace(options, **changes)
    plan = Plan(options, request_body(options))
    return make_config(
        plan, [find_method(one, EMBEDDED_SETTINGS) for one in options.methods], False
    )


def test_a_folder_says_what_is_run_and_goes_on(tmp_path: Path) -> None:
    settle_config(tmp_path, config_of(OPTIONS))
    config = read_config(tmp_path)
    assert config["methods"] == ["dense", "newest"]
    assert config["method_flags"]["newest"][-4:] == EMBEDDED_FLAGS
    assert config["problems"]["tiny_reasoner/1"]["count"] == 3
    assert config["sampling"]["temperature"] == 0.0 and config["versions"]["sglang"]
    assert config["machine"]["cores"] > 0 and config["machine"]["ram_bytes"] > 0
    # A run may continue on another machine.
    again = config_of(OPTIONS)
    again["machine"]["cores"] = 1024
    settle_config(tmp_path, again)
    # Equal options give the same default folder, other options another folder.
    folder = default_folder(config_of(OPTIONS))
    assert folder == default_folder(config_of(OPTIONS)) and folder.parent == Path("out")
    assert folder.name.startswith("tiny_reasoner-tiny_reasoner-")
    assert folder != default_folder(config_of(OPTIONS, limit=2))


def test_another_command_is_refused(tmp_path: Path) -> None:
    settle_config(tmp_path, config_of(OPTIONS))
    before = (tmp_path / "config.json").read_bytes()
    others: list[dict[str, Any]] = [{"limit": 4}, {"seeds": (0, 2)}, {"in_flight": 2}]
    others += [{"kv_budget": 4000}, {"max_tokens": 100}, {"temperature": 0.5}]
    others += [{"server_flags": ("--tp", "2")}, {"methods": ("reasoncache", "dense")}]
    for other in (*others, {"methods": ("dense", "reasoncache:block=4")}):
        (field,) = other
        with pytest.raises(RunError, match=rf"config.json: {field} is .* in this run, now "):
            settle_config(tmp_path, config_of(OPTIONS, **other))
        assert (tmp_path / "config.json").read_bytes() == before


def test_changed_or_missing_data_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "aime.jsonl"
    options = RunOptions(tasks=("aime24",), data={"aime24": write(data, 2)}, device="cpu")
    settle_config(tmp_path / "run", config_of(options))
    data.write_text(data.read_text() + "\n")
    with pytest.raises(RunError, match=r"config.json: data is .*sha256"):
        settle_config(tmp_path / "run", config_of(options))
    with pytest.raises(ValueError, match=str(tmp_path / "no")):
        config_of(options, data={"aime24": str(tmp_path / "no")})


def test_one_process_at_a_time(tmp_path: Path) -> None:
    for _ in range(2):
        with (
            locked(tmp_path),
            pytest.raises(RunError, match="lock: another process works in this folder"),
            locked(tmp_path),
        ):
            pass


def test_reasoning_that_the_prompt_opened_holds_no_answer(tmp_path: Path) -> None:
    """If the prompt ends with <think>, a response without </think> is wrong. A missing response is wrong."""
    cell = Cell(tmp_path, "aime24", "dense", 0)
    task = EvalTask("aime24", Source(file=write(tmp_path / "x.jsonl", 7, 7, 7, 7)))
    rows = [response("0", text="Perhaps \\boxed{7}? No,")]
    rows += [response("1", text="Perhaps 8? No.</think> \\boxed{7}")]
    cell.write([*rows, response("2", error="timed out")], [], served())
    for opens, right in ((True, [False, True]), (False, [True, True])):
        results = grade(cell, task, opens)
        assert [row.correct for row in results] == [*right, False, False]
        assert results[2].note == "no response: timed out" and results == cell.results()


def options(*argv: str) -> RunOptions:
    return parse(argv)[0]


def test_defaults_lists_and_pairs(tmp_path: Path) -> None:
    found = options("--tasks", "tiny_reasoner")
    assert found.embedded and found.methods == ("dense", "newest")
    assert (found.seeds, found.in_flight, found.attempts) == ((0,), None, 2)
    found = options(
        "--tasks", "a,b",
        "--methods", "dense,reasoncache:block=8,percentile=50,random:random_ratio=0.2,p20",
        "--seeds", "2,0",
        "--data", f"a={tmp_path}/x=y.jsonl",
        "--server-flags", "--tp 2 --mem-fraction-static '0.8'",
        "--top-k", "20", "--temperature", "0.6",
    )  # fmt: skip
    own = "reasoncache:block=8,percentile=50"
    assert found.methods == ("dense", own, "random:random_ratio=0.2", "p20")
    assert found.seeds == (2, 0)
    assert found.data == {"a": f"{tmp_path}/x=y.jsonl"}
    assert found.server_flags == ("--tp", "2", "--mem-fraction-static", "0.8")
    assert found.sampling_overrides == {"top_k": 20, "temperature": 0.6}


def test_flags_of_a_file(tmp_path: Path) -> None:
    """``@FILE`` stands for the flags in the file. Later flags override earlier flags."""
    file = tmp_path / "run.flags"
    file.write_text(
        "# Ours.\n--model m --tasks a --out there --seeds 1,2\n--methods '\n dense,\n p20'"
    )
    found, out = parse((f"@{file}", "--seeds", "7"))
    assert (found.model, found.tasks, found.methods) == ("m", ("a",), ("dense", "p20"))
    assert (found.seeds, out) == ((7,), Path("there"))
    answers = options(f"@{ROOT}/eval/small_reasoner/answers.flags")
    assert all(find_method(spec) for spec in answers.methods) and len(answers.methods) == 14


BAD_FLAGS = {
    "": "--tasks must name one or more, none twice",
    "--tasks a,a": "--tasks: must name one or more, none twice, got 'a,a'",
    "--tasks a --methods dense,dense": "--methods must name one or more, none twice",
    "--tasks a --seeds 0,x": "--seeds: must be numbers, got '0,x'",
    "--tasks a --limit 0": "--limit: must be at least 1, got 0",
    "--tasks a --top-p nan": "--top-p: must be at least 0, got nan",
    "--tasks a --request-timeout inf": "--request-timeout: must be at most 1e+09, got inf",
    "--tasks a --device tpu": "--device: must be of auto, cpu, cuda, got tpu",
    "--tasks a --data b=c": "--data b=...: 'b' is not among --tasks",
    "--tasks a --data a": "must be NAME=VALUE, got 'a'",
    "--tasks a --limit x": "--limit: invalid int value: 'x'",
    "--tasks a @/nowhere.flags": "No such file or directory: '/nowhere.flags'",
    "--task a": "unrecognized arguments",
    "--tasks a --server-flags": "--server-flags: expected one argument",
}


@pytest.mark.parametrize("words", BAD_FLAGS)
def test_the_bad_is_named(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(words.split())
    assert refused.value.code == 2
    assert BAD_FLAGS[words] in capsys.readouterr().err


def test_options_become_values_and_flags() -> None:
    """A server that parses a method's flags gets the values that the method asked for."""
    spec = "reasoncache:block=32,use-structure=false,fixed_tau=0.8"
    method = find_method(spec, EMBEDDED_SETTINGS)
    own = {**EMBEDDED_SETTINGS, "block": 32, "use_structure": False, "fixed_tau": 0.8}
    assert method.values == {"preset": "reasoncache", **own}
    assert method.name == spec
    parser = argparse.ArgumentParser()
    add_cli_args(None, parser)
    args = parser.parse_args(method.flags)
    assert args.enable_reasoncache and args.reasoncache_preset == "reasoncache"
    (others,) = args.reasoncache_set
    assert {"block": args.reasoncache_block, **parse_settings(others)} == own
    assert find_method("memshare", EMBEDDED_SETTINGS).flags[-4:] == EMBEDDED_FLAGS
    assert find_method("memshare:block=4", EMBEDDED_SETTINGS).values["block"] == 4
    # Flags in ``more`` come last, so that they override the method's flags.
    method = dataclasses.replace(find_method("p50"), more=("--page-size", "8"))
    assert method.flags == [*find_method("p50").flags, "--page-size", "8"]


def test_stock_settings_become_flags_and_variables() -> None:
    method = find_method("dense:clip=64:conservativeness=0.3:kv=fp8_e4m3", EMBEDDED_SETTINGS)
    assert not method.shares and not method.values
    assert method.flags == ["--schedule-conservativeness", "0.3", "--kv-cache-dtype", "fp8_e4m3"]
    assert method.env == {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "64"}
    # The same bytes hold twice the slots.
    options = parse(["--tasks", "tiny_reasoner", "--limit", "1", "--kv-budget", "4000"])[0]
    flags = Plan(options, request_body(options)).server_flags(Step("tiny_reasoner", 0, method))
    assert flags[flags.index("--max-total-tokens") + 1] == "8000"


def test_sharing_takes_the_flags_of_stock() -> None:
    spec = "newest:kv=fp8_e4m3,block=4,conservativeness=0.3"
    method = find_method(spec, {"min_age": 32})
    assert method.values == {"preset": "newest", "min_age": 32, "block": 4}
    assert method.flags[-4:] == [
        *("--schedule-conservativeness", "0.3"),
        *("--kv-cache-dtype", "fp8_e4m3"),
    ]
    assert method.slot_bytes == 0.5 and not method.env
    assert find_method("newest:kv=fp8_e4m3").values == {"preset": "newest"}
    for bad in ("newest:clip=64", "newest:kv=", "newest:kv=a,kv=b", "newest:"):
        with pytest.raises(MethodError):
            find_method(bad)


def test_tuned_is_the_best_of_what_was_swept(tmp_path: Path) -> None:
    """Its settings are found once, with the first seed and all tasks, and kept with the run."""
    options = RunOptions(tasks=("a", "b"), seeds=(3, 4), methods=("dense", "tuned"))
    best = CANDIDATES[4]
    asked = []

    def measure(what: RunOptions, folder: Path) -> bool:
        asked.append(what)
        for task, spec in itertools.product(what.tasks, what.methods):
            Cell(folder, task, spec, 3).write([], [], served(output_tokens=200 + (spec == best)))
        return True

    for _ in range(2):
        found = tuned(find_method("tuned:kv=fp8_e5m2"), options, tmp_path, measure)
        assert found.stock == {**find_method(best).stock, "kv": "fp8_e5m2"}
        assert found.name == "tuned:kv=fp8_e5m2" and not found.shares
    (what,) = asked
    assert what.seeds == (3,) and what.methods == CANDIDATES
    (tmp_path / "tuned.json").write_text("{}")
    with pytest.raises(RunError, match=r"tuned\.json"):
        tuned(find_method("tuned"), options, tmp_path, measure)


def test_refusals_name_the_fault() -> None:
    for spec, told in {
        "sparse": "known are dense, tuned, newest, reasoncache",
        "reasoncache:block": "must be key=value,..., got 'block'",
        "reasoncache:blocks=3": "blocks must be one of ",
        "reasoncache:preset=random": "the name is the preset",
        "reasoncache:block=0": "--reasoncache-block must be between 1 and 1024, got 0",
        "reasoncache:use_structure=maybe": "true or false",
        "dense:block=8": "dense takes each of clip, conservativeness, kv, reserved at most once, got 'block=8'",
        "dense:clip=8:clip=9": "at most once, got 'clip=9'",
        "dense:clip=0": "clip must be an integer of at least 1, got '0'",
        "dense:conservativeness=0": "conservativeness must be above 0, got '0'",
        "tuned:clip=8": "tuned takes each of kv at most once, got 'clip=8'",
        "reasoncache:align=a b": "is no method",
    }.items():
        with pytest.raises(MethodError, match="--methods") as refused:
            find_method(spec)
        assert told in str(refused.value), spec
