# SPDX-License-Identifier: Apache-2.0
"""One run a KV budget: which budgets are tried, and what the status says."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import run, sweep


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
