# SPDX-License-Identifier: Apache-2.0
"""``eval.run`` where no server answers, which budgets ``eval.sweep`` tries, flags of ``eval.demo``."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import demo, run, sweep
from eval.runs.folder import read_config
from eval.serving import free_port


def test_a_dead_server_is_told_and_the_next_cell_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"{name}=http://127.0.0.1:{free_port()}" for name in ("dense", "reasoncache")]
    argv = ["--tasks", "tiny_reasoner", "--limit", "2", "--device", "cpu"]
    argv += ["--out", str(tmp_path), "--url", urls[0], "--url", urls[1]]
    assert run.main(argv) == 1
    told = capsys.readouterr().out
    for url in urls:
        assert f"--url {url.partition('=')[2]}: /v1/models says" in told
    assert read_config(tmp_path)["methods"] == ["dense", "reasoncache"]
    assert list(tmp_path.glob("tiny_reasoner/*")) == []


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--tasks", "nothing", "--out", str(tmp_path)]) == 1
    assert run.main(["--tasks", "tiny_reasoner", "--methods", "sparse", "--device", "cpu"]) == 1
    assert run.main(["--resume", str(tmp_path / "no")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("eval.run: error: ") for line in lines] == [True] * 3
    assert list(tmp_path.iterdir()) == []


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
    assert commands[0] == [
        "--tasks", "tiny_reasoner", "--server-flags=--tp=2",
        "--kv-budget", "900", "--out", str(tmp_path / "kv-900"),
    ]  # fmt: skip


@pytest.mark.parametrize("budgets", ["9,9", "0,3", "x", ""])
def test_bad_budgets_are_named(budgets: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.main(["--budgets", budgets, "--out", "o"])
    assert "--budgets" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sweep.main(["--budgets", "9", "--out", "o", "--kv-budget=4"])
    assert "--kv-budget=4 does not go with --budgets" in capsys.readouterr().err


def test_single_flags_are_values() -> None:
    options = demo.parse(["--both", "--tp=2", "--shared", "--reasoncache-admission-credit 0"])
    assert options.shared == ["--reasoncache-admission-credit", "0"]
    assert demo.run_options(options).server_flags == ("--tp=2",)
