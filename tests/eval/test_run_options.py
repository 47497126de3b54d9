# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m eval.run`` and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.runs.config import options_of
from eval.runs.options import RunOptions, parse


def options(*argv: str) -> RunOptions:
    found = parse(argv).options
    assert found is not None
    return found


def test_defaults_are_the_embedded_model() -> None:
    found = options("--tasks", "tiny_reasoner")
    assert found.embedded
    assert found.methods == ("dense", "reasoncache")
    assert (found.seeds, found.in_flight, found.attempts) == ((0,), None, 2)


def test_lists_and_pairs(tmp_path: Path) -> None:
    found = options(
        "--tasks", "a,b",
        "--methods", "dense,reasoncache:block=8,percentile=50,random:match=memshare,p20",
        "--seeds", "2,0",
        "--data", f"a={tmp_path}/x=y.jsonl",
        "--url", "dense=http://h:1/x=1",
        "--url", "reasoncache:block=8,percentile=50=http://h:2",
        "--server-flags", "--tp 2 --mem-fraction-static '0.8'",
        "--top-k", "20",
        "--temperature", "0.6",
    )  # fmt: skip
    assert found.methods == (
        "dense",
        "reasoncache:block=8,percentile=50",
        "random:match=memshare",
        "p20",
    )
    assert found.seeds == (2, 0)
    assert found.data == {"a": f"{tmp_path}/x=y.jsonl"}
    assert found.urls == {
        "dense": "http://h:1/x=1",
        "reasoncache:block=8,percentile=50": "http://h:2",
    }
    assert found.server_flags == ("--tp", "2", "--mem-fraction-static", "0.8")
    assert found.sampling_overrides == {"top_k": 20, "temperature": 0.6}


@pytest.mark.parametrize(
    "words",
    [
        ["--server-flags", "--enable-deterministic-inference"],
        ["--server-flags=--enable-deterministic-inference"],
    ],
)
def test_a_single_server_flag_is_a_value(words: list[str]) -> None:
    found = options("--tasks", "a", *words, "--seeds", "3")
    assert found.server_flags == ("--enable-deterministic-inference",)
    assert found.seeds == (3,)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'model = "m"\ntasks = ["a"]\nmethods = "dense,p20"\nseeds = [1, 2]\nmax-tokens = 9\n'
        'out = "there"\ntemperature = 0.5\n[data]\na = "a.jsonl"\n[url]\ndense = "http://h"\n'
    )
    command = parse(["--config", str(file), "--seeds", "7"])
    found = command.options
    assert found is not None
    assert (found.model, found.tasks, found.methods) == ("m", ("a",), ("dense", "p20"))
    assert (found.seeds, found.max_tokens, command.out) == ((7,), 9, Path("there"))
    assert found.sampling_overrides == {"temperature": 0.5}
    assert found.urls == {"dense": "http://h"}


def test_back_from_a_folder() -> None:
    found = options(
        "--tasks", "a", "--methods", "dense,p20:block=4", "--seeds", "0,1", "--top-p", "1"
    )
    config = {**found.to_dict(), "method_specs": found.methods, "data": {}}
    assert options_of(json.loads(json.dumps(config))) == found


def test_resume_and_grade_stand_alone() -> None:
    assert parse(["--resume", "x"]).resume == Path("x")
    command = parse(["--grade", "x", "--allow-code-execution"])
    assert (command.grade, command.allow_code_execution) == (Path("x"), True)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "--tasks must name at least one, none twice"),
        (["--tasks", "a,a"], "--tasks must name at least one, none twice, got ['a', 'a']"),
        (["--tasks", "a", "--seeds", "0,x"], "--seeds: must be numbers, got '0,x'"),
        (["--tasks", "a", "--limit", "0"], "--limit must be an integer of at least 1, got 0"),
        (["--tasks", "a", "--in-flight", "-1"], "--in-flight must be"),
        (["--tasks", "a", "--attempts", "0"], "--attempts must be"),
        (["--tasks", "a", "--temperature", "-1"], "--temperature must be between 0 and 100"),
        (["--tasks", "a", "--top-p", "nan"], "--top-p must be between 0 and 1, got nan"),
        (["--tasks", "a", "--request-timeout", "inf"], "--request-timeout must be between"),
        (["--tasks", "a", "--device", "tpu"], "--device must be auto, cpu or cuda, got 'tpu'"),
        (["--tasks", "a", "--data", "b=c"], "--data b=...: 'b' is not among --tasks"),
        (["--tasks", "a", "--url", "p20=http://h"], "'p20' is not among --methods"),
        (["--tasks", "a", "--url", "dense=ftp://h"], "METHOD=http://"),
        (["--tasks", "a", "--data", "a"], "must be NAME=VALUE, got 'a'"),
        (["--resume", "x", "--limit", "3"], "--resume goes without --limit"),
        (["--grade", "x", "--config", "y"], "--grade goes without --config"),
        (["--tasks", "a", "--config", "/nowhere.toml"], "--config /nowhere.toml"),
        (["--task", "a"], "unrecognized arguments"),
        (["--tasks", "a", "--server-flags"], "--server-flags: expected one argument"),
    ],
)
def test_bad_flags_are_named(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(argv)
    assert refused.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tasks = 'a'\nlimit = 'x'", "--limit: invalid int value: 'x'"),
        ("tasks = 'a'\nseeds = 'x'", "--seeds: must be numbers"),
        ("tasks = 'a'\nseeds = []", "--seeds must name at least one"),
        ("task = 'a'", "unknown name 'task'"),
        ("tasks = [", "--config"),
        ("tasks = 'a'\ndata = 3", "--data: must be NAME=VALUE, got '3'"),
    ],
)
def test_bad_files_are_named(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parse(["--config", str(file)])
    assert told in capsys.readouterr().err
