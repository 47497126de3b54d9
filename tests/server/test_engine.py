# SPDX-License-Identifier: Apache-2.0
"""Runs an ``sglang.Engine`` that shares, then a stock one, in one process. Both spawn their subprocesses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eval.serving import ServerProcess
from tests.conftest import ROOT

_SCRIPT = """
import sys

import sglang
from sglang.srt.server_args import ServerArgs

from eval.tiny_reasoner.task import generate

COMMON = dict(
    model_path=sys.argv[1], device="cpu", attention_backend="torch_native",
    max_total_tokens=4096, random_seed=0, log_level="error",
)
SHARING = dict(
    enable_reasoncache=True, reasoncache_when="always", reasoncache_percentile=100.0,
    reasoncache_min_age=32, reasoncache_positions="as-cached",
)


def run(engine):
    prompt = f"<|user|> {generate(5, 1)[0].prompt} <|assistant|>"
    engine.generate(prompt, {"temperature": 0, "max_new_tokens": 900})
    state = engine.get_server_info()["internal_states"][0].get("reasoncache")
    engine.shutdown()
    return state and state["totals"]["blocks_shared"]


if __name__ == "__main__":
    assert run(sglang.Engine(**COMMON, **SHARING)) > 0
    # A ready record does not pass our keyword hook, so nothing was switched off.
    assert run(sglang.Engine(server_args=ServerArgs(**COMMON))) is None
    print("both engines as asked")
"""


@pytest.mark.long
def test_engine_shares_and_leaves_no_trace(model_path: Path, tmp_path: Path) -> None:
    script = tmp_path / "engines.py"
    script.write_text(_SCRIPT)
    env = {**ServerProcess(model_path, env={"REASONCACHE_FORK": None}).env, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), env["PYTHONPATH"]))
    command = [sys.executable, str(script), str(model_path)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert "both engines as asked" in done.stdout, done.stderr[-4000:]
