# SPDX-License-Identifier: Apache-2.0
"""Starts SGLang without its command line, as launchers of rollouts do: as an ``sglang.Engine``, or as a server
whose ``ServerArgs`` the launcher made. All of them spawn their subprocesses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eval.serving import ServerProcess, free_port
from tests.conftest import ROOT
from tests.server.problems import prompts

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


#: A launcher that knows nothing of this plugin, and spawns SGLang's HTTP server (as slime does) or makes an
#: engine without a tokenizer from ready ``ServerArgs`` (as verl does). It imports no plugin before SGLang does.
_LAUNCHER = """
import multiprocessing
import sys
import time

import requests
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs

MODEL, PORT, HOW, PROMPT = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
SAMPLING = {"temperature": 0, "max_new_tokens": 900}


def args(**more):
    return ServerArgs(
        model_path=MODEL, device="cpu", max_total_tokens=4096, random_seed=0, log_level="error",
        host="127.0.0.1", port=PORT, **more,
    )


def serve():
    process = multiprocessing.Process(target=launch_server, args=(args(),))
    process.start()
    url = f"http://127.0.0.1:{PORT}"
    try:
        while process.is_alive():
            time.sleep(1)
            try:
                if requests.get(url + "/health_generate").status_code == 200:
                    break
            except requests.ConnectionError:
                pass
        requests.post(url + "/generate", json={"text": PROMPT, "sampling_params": SAMPLING})
        return requests.get(url + "/reasoncache").json()["schedulers"][0]
    finally:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(process.pid)


def embed():
    import sglang

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(MODEL).encode(PROMPT, add_special_tokens=False)
    engine = sglang.Engine(server_args=args(skip_tokenizer_init=True))
    try:
        assert len(engine.generate(input_ids=ids, sampling_params=SAMPLING)["output_ids"]) > 300
        return engine.get_server_info()["internal_states"][0].get("reasoncache")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    state = {"serve": serve, "embed": embed}[HOW]()
    print("blocks shared:", state and state["totals"]["blocks_shared"], "by", state and state["config"])
"""


def _run(tmp_path: Path, text: str, model_path: Path, *more: str, **env: str) -> str:
    script = tmp_path / "launcher.py"
    script.write_text(text)
    env = {**ServerProcess(model_path, env={"REASONCACHE_FORK": None}).env, **env}
    env |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), env["PYTHONPATH"])),
    }
    command = [sys.executable, str(script), str(model_path), *more]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    return done.stdout + done.stderr[-20_000:]


@pytest.mark.long
def test_engine_shares_and_leaves_no_trace(model_path: Path, tmp_path: Path) -> None:
    assert "both engines as asked" in _run(tmp_path, _SCRIPT, model_path)


@pytest.mark.long
@pytest.mark.parametrize("how", ["serve", "embed"])
def test_a_variable_switches_on_what_a_launcher_starts(
    how: str, model_path: Path, tmp_path: Path
) -> None:
    """The launcher makes ``ServerArgs`` itself, and SGLang resolves them before it loads plugins."""
    words = "--enable-reasoncache --reasoncache-when always --reasoncache-set min_age=32"
    more = str(free_port()), how, prompts(1, seed=5)[0]
    said = _run(tmp_path, _LAUNCHER, model_path, *more, SGLANG_REASONCACHE=words)
    found = re.search(r"blocks shared: (\d+) by .*'when': 'always'", said)
    assert found and int(found[1]) > 0, said
    said = _run(
        tmp_path, _LAUNCHER, model_path, *more, SGLANG_REASONCACHE=words.replace("always", "never")
    )
    assert "SGLANG_REASONCACHE: argument --reasoncache-when: invalid choice: 'never'" in said
