# SPDX-License-Identifier: Apache-2.0
"""Command lines of ``eval.run``, ``eval.sweep``, ``eval.demo``, and methods by name."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from eval import demo, run, sweep
from eval.methods import METHODS, MethodError, find_method, find_methods, with_ratio
from eval.runs.config import options_of
from eval.runs.folder import read_config
from eval.runs.options import RunOptions, parse
from eval.serving import free_port
from eval.tiny_reasoner import EMBEDDED_SETTINGS
from sglang_reasoncache.config import parse_settings
from sglang_reasoncache.filter.presets import PRESETS
from sglang_reasoncache.plugin.flags import add_cli_args


def options(*argv: str) -> RunOptions:
    found = parse(argv).options
    assert found is not None
    return found


def test_defaults_lists_and_pairs(tmp_path: Path) -> None:
    found = options("--tasks", "tiny_reasoner")
    assert found.embedded and found.methods == ("dense", "reasoncache")
    assert (found.seeds, found.in_flight, found.attempts) == ((0,), None, 2)
    found = options(
        "--tasks", "a,b",
        "--methods", "dense,reasoncache:block=8,percentile=50,random:match=memshare,p20",
        "--seeds", "2,0",
        "--data", f"a={tmp_path}/x=y.jsonl",
        "--url", "dense=http://h:1/x=1",
        "--url", "reasoncache:block=8,percentile=50=http://h:2",
        "--server-flags", "--tp 2 --mem-fraction-static '0.8'",
        "--top-k", "20", "--temperature", "0.6",
    )  # fmt: skip
    own = "reasoncache:block=8,percentile=50"
    assert found.methods == ("dense", own, "random:match=memshare", "p20")
    assert found.seeds == (2, 0)
    assert found.data == {"a": f"{tmp_path}/x=y.jsonl"}
    assert found.urls == {"dense": "http://h:1/x=1", own: "http://h:2"}
    assert found.server_flags == ("--tp", "2", "--mem-fraction-static", "0.8")
    assert found.sampling_overrides == {"top_k": 20, "temperature": 0.6}


def test_a_single_server_flag_is_a_value() -> None:
    flag = "--enable-deterministic-inference"
    for words in (["--server-flags", flag], [f"--server-flags={flag}"]):
        found = options("--tasks", "a", *words, "--seeds", "3")
        assert (found.server_flags, found.seeds) == ((flag,), (3,))
    args = demo.parse(["--both", "--tp=2", "--shared", "--reasoncache-admission-credit 0"])
    assert args.shared == ["--reasoncache-admission-credit", "0"]
    assert demo.run_options(args).server_flags == ("--tp=2",)


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


def test_a_folder_has_it_all() -> None:
    argv = ("--tasks", "a", "--methods", "dense,p20:block=4", "--seeds", "0,1", "--top-p", "1")
    found = options(*argv)
    config = {**found.to_dict(), "method_specs": found.methods, "data": {}}
    assert options_of(json.loads(json.dumps(config))) == found
    assert parse(["--resume", "x"]).resume == Path("x")
    command = parse(["--grade", "x", "--allow-code-execution"])
    assert (command.grade, command.allow_code_execution) == (Path("x"), True)


BAD_FLAGS = {
    "": "--tasks must name at least one, none twice",
    "--tasks a,a": "--tasks must name at least one, none twice, got ['a', 'a']",
    "--tasks a --seeds 0,x": "--seeds: must be numbers, got '0,x'",
    "--tasks a --limit 0": "--limit must be an integer of at least 1, got 0",
    "--tasks a --in-flight -1": "--in-flight must be",
    "--tasks a --attempts 0": "--attempts must be",
    "--tasks a --temperature -1": "--temperature must be between 0 and 100",
    "--tasks a --top-p nan": "--top-p must be between 0 and 1, got nan",
    "--tasks a --request-timeout inf": "--request-timeout must be between",
    "--tasks a --device tpu": "--device must be auto, cpu or cuda, got 'tpu'",
    "--tasks a --data b=c": "--data b=...: 'b' is not among --tasks",
    "--tasks a --url p20=http://h": "'p20' is not among --methods",
    "--tasks a --url dense=ftp://h": "METHOD=http://",
    "--tasks a --data a": "must be NAME=VALUE, got 'a'",
    "--resume x --limit 3": "--resume goes without --limit",
    "--grade x --config y": "--grade goes without --config",
    "--tasks a --config /nowhere.toml": "--config /nowhere.toml",
    "--task a": "unrecognized arguments",
    "--tasks a --server-flags": "--server-flags: expected one argument",
}
BAD_FILES = {
    "tasks = 'a'\nlimit = 'x'": "--limit: invalid int value: 'x'",
    "tasks = 'a'\nseeds = 'x'": "--seeds: must be numbers",
    "tasks = 'a'\nseeds = []": "--seeds must name at least one",
    "task = 'a'": "unknown name 'task'",
    "tasks = [": "--config",
    "tasks = 'a'\ndata = 3": "--data: must be NAME=VALUE, got '3'",
}


@pytest.mark.parametrize("words", [*BAD_FLAGS, *BAD_FILES])
def test_the_bad_is_named(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(words)
    argv = words.split() if words in BAD_FLAGS else ["--config", str(tmp_path / "run.toml")]
    with pytest.raises(SystemExit) as refused:
        parse(argv)
    assert refused.value.code == 2
    assert (BAD_FLAGS | BAD_FILES)[words] in capsys.readouterr().err


def test_dead_servers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = [f"{name}=http://127.0.0.1:{free_port()}" for name in ("dense", "reasoncache")]
    argv = ["--tasks", "tiny_reasoner", "--limit", "2", "--device", "cpu"]
    argv += ["--out", str(tmp_path), "--url", urls[0], "--url", urls[1]]
    assert run.main(argv) == 1
    told = capsys.readouterr().out
    for url in urls:
        assert f"--url {url.partition('=')[2]}: /v1/models says" in told
    assert read_config(tmp_path)["methods"] == ["dense", "reasoncache"]
    assert list(tmp_path.glob("tiny_reasoner/*")) == []
    # Other mistakes are one line.
    out = tmp_path / "out"
    assert run.main(["--tasks", "nothing", "--out", str(out)]) == 1
    assert run.main(["--tasks", "tiny_reasoner", "--methods", "sparse", "--device", "cpu"]) == 1
    assert run.main(["--resume", str(tmp_path / "no")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("eval.run: error: ") for line in lines] == [True] * 3
    assert not out.exists()


@pytest.mark.parametrize(
    ("statuses", "tried", "status"),
    [([0, 0, 0], 3, 0), ([0, 1, 0], 3, 1), ([1, 0, 0], 3, 1), ([0, 130, 0], 2, 130), ([2], 1, 2)],
)
def test_a_run_that_is_not_whole_does_not_stop_the_sweep(
    statuses: list[int], tried: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def main(argv: list[str]) -> int:
        commands.append(argv)
        return statuses[len(commands) - 1]

    monkeypatch.setattr(run, "main", main)
    rest = ["--tasks", "tiny_reasoner", "--server-flags", "--tp=2"]
    assert sweep.main(["--budgets", "900,300,100", "--out", str(tmp_path), *rest]) == status
    assert len(commands) == tried
    given = ["--tasks", "tiny_reasoner", "--server-flags=--tp=2", "--kv-budget", "900"]
    assert commands[0] == [*given, "--out", str(tmp_path / "kv-900")]


def test_bad_budgets_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for budgets in ("9,9", "0,3", "x", "9,x", ""):
        with pytest.raises(SystemExit):
            sweep.main(["--budgets", budgets, "--out", "o"])
        assert (
            f"--budgets: must be different numbers of KV slots of at least 1, got {budgets!r}"
            in (capsys.readouterr().err)
        )
    with pytest.raises(SystemExit):
        sweep.main(["--budgets", "9", "--out", "o", "--kv-budget=4"])
    assert "--kv-budget=4 does not go with --budgets" in capsys.readouterr().err


def test_every_preset_is_a_method_and_dense_is_stock() -> None:
    dense = find_method("dense", EMBEDDED_SETTINGS)
    assert (dense.name, dense.flags, dense.shares) == ("dense", [], False)
    for name in PRESETS:
        method = find_method(name)
        assert method.flags == ["--enable-reasoncache", "--reasoncache-preset", name]
    assert [find_method(name).title for name in METHODS] == list(METHODS.values())
    assert all(METHODS.values())


def test_options_become_values_and_flags() -> None:
    """SGLang's parser with our flags reads them back."""
    spec = "reasoncache:block=32,use-structure=false,fixed_tau=0.8"
    method = find_method(spec, EMBEDDED_SETTINGS)
    own = {"block": 32, "use_structure": False, "fixed_tau": 0.8}
    assert method.values == {"preset": "reasoncache", **own}
    assert (method.name, method.title.count("block=32")) == (spec, 1)
    parser = argparse.ArgumentParser()
    add_cli_args(None, parser)
    args = parser.parse_args(method.flags)
    assert args.enable_reasoncache and args.reasoncache_preset == "reasoncache"
    (others,) = args.reasoncache_set
    assert {"block": args.reasoncache_block, **parse_settings(others)} == own
    # A name is a folder.
    assert "/" not in find_method("reasoncache:calibration=a/b.json").name
    assert find_method("memshare", EMBEDDED_SETTINGS).flags[-2:] == ["--reasoncache-block", "8"]
    assert find_method("memshare:block=4", EMBEDDED_SETTINGS).values["block"] == 4
    # Further words come last.
    method = dataclasses.replace(find_method("p50"), more=("--page-size", "8"))
    assert method.flags == [*find_method("p50").flags, "--page-size", "8"]


def test_refusals_name_the_fault() -> None:
    for spec, told in {
        "sparse": "known are dense, reasoncache",
        "": "--methods",
        "reasoncache:block": "'block' is not key=value",
        "reasoncache:blocks=3": "no option 'blocks'",
        "reasoncache:preset=random": "no option 'preset'",
        "reasoncache:block=x": "--reasoncache-block must be an integer, got 'x'",
        "reasoncache:block=0": "--reasoncache-block must be between 1 and 1024, got 0",
        "reasoncache:use_structure=maybe": "true or false",
        "reasoncache:match=dense": "no option 'match'",
        "dense:block=8": "dense takes no options",
        "random:match=reasoncache,random_ratio=0.2": "exclude",
        "random:random_ratio=0.2,match=reasoncache:block=8": "exclude",
        "random:match=": "'match=' is not key=value",
        **dict.fromkeys(("random:block=8,", "random:match=memshare,"), "'' is not key=value"),
        "reasoncache:encoder=a b": "is no method",
    }.items():
        with pytest.raises(MethodError, match="--methods") as refused:
            find_method(spec)
        assert told in str(refused.value), spec


def test_what_random_matches() -> None:
    methods = find_methods(["random", "dense", "reasoncache"])
    assert methods[0].match == "reasoncache"
    ratio = ["--reasoncache-set", "random_ratio=0.4321"]
    assert with_ratio(methods[0], 0.43211).flags[-2:] == ratio
    assert find_methods(["memshare", "random:match=memshare"])[1].match == "memshare"
    # What is matched can have options, and a given ratio matches nothing.
    target = "reasoncache:block=32,percentile=50"
    methods = find_methods([target, f"random:block=8,match={target}", f"random:match={target}"])
    assert [method.match for method in methods] == ["", target, target]
    assert methods[1].values == {"preset": "random", "block": 8}
    assert methods[2].flags == find_method("random").flags
    (method,) = find_methods(["random:random_ratio=0.4321"])
    assert (method.match, method.flags[-2:]) == ("", ratio)
    refused = ["dense random", "random:match=dense dense", "random:match=random", "dense dense"]
    for specs in (*refused, "reasoncache random:match=nothing"):
        with pytest.raises(MethodError, match="--methods"):
            find_methods(specs.split())
