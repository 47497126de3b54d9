# SPDX-License-Identifier: Apache-2.0
"""``python -m eval.run`` where no server answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.run import main
from eval.runs.folder import read_config
from eval.serving import free_port


def test_a_dead_server_is_told_and_the_next_cell_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    urls = [f"{name}=http://127.0.0.1:{free_port()}" for name in ("dense", "reasoncache")]
    argv = ["--tasks", "tiny_reasoner", "--limit", "2", "--device", "cpu"]
    argv += ["--out", str(tmp_path), "--url", urls[0], "--url", urls[1]]
    assert main(argv) == 1
    told = capsys.readouterr().out
    for url in urls:
        assert f"--url {url.partition('=')[2]}: /v1/models says" in told
    assert read_config(tmp_path)["methods"] == ["dense", "reasoncache"]
    assert list(tmp_path.glob("tiny_reasoner/*")) == []


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tasks", "nothing", "--out", str(tmp_path)]) == 1
    assert main(["--tasks", "tiny_reasoner", "--methods", "sparse", "--device", "cpu"]) == 1
    assert main(["--resume", str(tmp_path / "no")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("eval.run: error: ") for line in lines] == [True] * 3
    assert list(tmp_path.iterdir()) == []
