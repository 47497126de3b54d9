# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of ``examples/`` as their users do, against the embedded reasoner."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from eval.serving import ServerProcess
from tests.conftest import ROOT
from tests.server import specs
from tests.server.problems import problems, prompts, report


def _run(name: str, *words: str, env: Mapping[str, str] | None = None) -> str:
    """The output of ``python examples/NAME.py``, which must succeed."""
    command = [sys.executable, str(ROOT / f"examples/{name}.py"), *words]
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **(env or {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-20_000:]
    return done.stdout


@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_chat(server: ServerProcess) -> None:
    [problem] = problems(1)
    said = _run("chat", "--url", server.url, problem.prompt)
    assert f"\\boxed{{ {problem.answer} }}" in said
    shared = re.search(r"blocks shared since the start: (\d+), .* disabled: no", said)
    assert shared and int(shared[1]) == report(server)["totals"]["blocks_shared"] > 0


@pytest.mark.long
@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_agent(server: ServerProcess) -> None:
    """Each turn goes on with what the turns before it shared."""
    todo = problems(2)
    said = _run("agent", "--url", server.url, *(problem.prompt for problem in todo))
    answers = re.findall(r"the tool got: (.*)", said)
    assert len(answers) == 2 and answers[0] == todo[0].answer
    found = re.search(r"that shared: (\d+), tokens read from it: (\d+)", said)
    assert found and int(found[1]) == 1 and int(found[2]) > 100


@pytest.mark.long
@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_rag(server: ServerProcess, tmp_path: Path) -> None:
    texts = ("one two three four five six", "seven eight nine ten", "eleven twelve thirteen")
    paths = [tmp_path / f"{number}.txt" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    files = [str(path) for path in paths]
    said = _run("rag", "--url", server.url, "--question", "which is last", "--most", "8", *files)
    assert re.findall(r"^(.*): first token after", said, re.MULTILINE) == [
        "0.txt, 1.txt, 2.txt",
        "2.txt, 1.txt, 0.txt",
    ]
    assert "documents read from the cache: 6, documents off: no" in said


@pytest.mark.long
@pytest.mark.parametrize("server", [specs.CORRECTED], indirect=True)
def test_rollouts(server: ServerProcess) -> None:
    said = _run("rollouts", "--url", server.url, "--samples", "3", prompts(1, seed=11)[0])
    found = re.findall(
        r"sample \d: (\d+) tokens, (\d+) blocks shared, the first (\d+) tokens before", said
    )
    assert len(found) == 3
    assert sum(int(blocks) for _, blocks, _ in found) == report(server)["totals"]["blocks_shared"]
    for tokens, blocks, exact in (map(int, one) for one in found):
        assert 0 < exact < tokens if blocks else exact == tokens


@pytest.mark.long
def test_engine(model_path: Path) -> None:
    """Nothing but the settings of the example lets the engine share."""
    env = ServerProcess(model_path, env={"REASONCACHE_FORK": None}).env
    env |= {"PYTHONPATH": os.pathsep.join((str(ROOT), env["PYTHONPATH"]))}
    options = ["--device", "cpu", "--slots", "4096", "--when", "always", "--model"]
    [problem] = problems(1)
    prompt = f"<|user|> {problem.prompt} <|assistant|>"
    said = _run("engine", *options, str(model_path), prompt, env=env)
    assert f"\\boxed{{ {problem.answer} }}" in said
    shared = re.search(r"blocks shared: (\d+)", said)
    assert shared and int(shared[1]) > 0
