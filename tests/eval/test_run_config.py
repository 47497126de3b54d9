# SPDX-License-Identifier: Apache-2.0
"""What a run folder refuses, and what it remembers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.methods import find_methods
from eval.runs.config import default_folder, make_config, options_of, settle_config
from eval.runs.folder import RunError, locked, read_config
from eval.runs.options import RunOptions
from eval.runs.plan import Plan, request_body
from eval.tiny_reasoner import EMBEDDED_FLAGS, EMBEDDED_SETTINGS

OPTIONS = RunOptions(tasks=("tiny_reasoner",), seeds=(0, 1), limit=3, device="cpu")
ROOT = Path(__file__).resolve().parents[2]


def config_of(options: RunOptions) -> dict[str, Any]:
    plan = Plan(options, request_body(options))
    return make_config(plan, find_methods(options.methods, EMBEDDED_SETTINGS), False)


def test_says_what_is_run(tmp_path: Path) -> None:
    settle_config(tmp_path, config_of(OPTIONS))
    config = read_config(tmp_path)
    assert config["methods"] == ["dense", "reasoncache"]
    assert config["method_details"]["reasoncache"]["flags"][-2:] == EMBEDDED_FLAGS
    assert config["problems"]["tiny_reasoner/1"]["count"] == 3
    assert config["sampling"]["temperature"] == 0.0
    assert config["machine"]["cores"] > 0
    assert config["machine"]["ram_bytes"] > 0
    assert config["versions"]["sglang"]
    assert options_of(config) == OPTIONS


def test_the_same_command_goes_on(tmp_path: Path) -> None:
    settle_config(tmp_path, config_of(OPTIONS))
    config, changed = settle_config(tmp_path, config_of(OPTIONS))
    assert changed == []
    assert len(config["resumed"]) == len(read_config(tmp_path)["resumed"]) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", 4),
        ("seeds", (0, 2)),
        ("methods", ("reasoncache", "dense")),
        ("methods", ("dense", "reasoncache:block=4")),
        ("in_flight", 2),
        ("kv_budget", 4000),
        ("max_tokens", 100),
        ("server_flags", ("--tp", "2")),
        ("temperature", 0.5),
    ],
)
def test_another_command_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    settle_config(tmp_path, config_of(OPTIONS))
    before = (tmp_path / "config.json").read_bytes()
    other = config_of(dataclasses.replace(OPTIONS, **{field: value}))
    with pytest.raises(RunError, match=rf"config.json: {field} is .* in this run, now "):
        settle_config(tmp_path, other)
    assert (tmp_path / "config.json").read_bytes() == before


def test_changed_data_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "aime.jsonl"
    row = {"id": 1, "problem": "1 + 1", "answer": "2"}
    data.write_text(json.dumps(row) + "\n")
    options = RunOptions(tasks=("aime24",), data={"aime24": str(data)}, device="cpu")
    settle_config(tmp_path / "run", config_of(options))
    data.write_text(json.dumps(row) + "\n\n")
    with pytest.raises(RunError, match=r"config.json: data is .*sha256"):
        settle_config(tmp_path / "run", config_of(options))


def test_missing_data_names_the_file(tmp_path: Path) -> None:
    options = RunOptions(tasks=("aime24",), data={"aime24": str(tmp_path / "no")}, device="cpu")
    with pytest.raises(ValueError, match=str(tmp_path / "no")):
        config_of(options)


def test_another_machine_is_told_not_refused(tmp_path: Path) -> None:
    config = config_of(OPTIONS)
    config["machine"]["cores"] = 1024
    settle_config(tmp_path, config)
    _, changed = settle_config(tmp_path, config_of(OPTIONS))
    assert [what for what in changed if what.startswith("machine.cores was 1024, is ")]


def test_default_folder_is_the_commands_own() -> None:
    folder = default_folder(config_of(OPTIONS))
    assert folder == default_folder(config_of(OPTIONS))
    assert folder.parent == Path("out")
    assert folder.name.startswith("tiny_reasoner-tiny_reasoner-")
    assert folder != default_folder(config_of(dataclasses.replace(OPTIONS, limit=2)))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Another process is refused and told who holds the folder; the kernel frees a dead one's."""
    script = (
        "import sys, pathlib\nfrom eval.runs.folder import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    print('in', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "in\n"
        with pytest.raises(RunError, match=f"lock: process {holder.pid} "), locked(tmp_path):
            pass
        holder.kill()
    with locked(tmp_path):
        pass


def test_other_problems_are_not_the_measured_ones() -> None:
    plan = Plan(OPTIONS, {})
    measured = [p.messages for task in plan.tasks.values() for p in task.problems]
    others = plan.others("tiny_reasoner", 0, 8)
    assert len(others) == 8
    assert not [p for p in others if p.messages in measured]


def test_sums_fill_up_what_a_file_lacks(tmp_path: Path) -> None:
    data = tmp_path / "aime.jsonl"
    rows = [{"id": i, "problem": f"1 + {i}", "answer": str(1 + i)} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = RunOptions(tasks=("aime24",), data={"aime24": str(data)}, limit=2, device="cpu")
    plan = Plan(options, {})
    others = plan.others("aime24", 0, 3)
    assert [p.id.startswith("sum-") for p in others] == [False, True, True]
    assert len(plan.others("aime24", 0, 3, generic=False)) == 1
