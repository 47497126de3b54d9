# SPDX-License-Identifier: Apache-2.0
"""Launching and ending a server process, with small stand-ins for SGLang."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eval import serving
from eval.serving import ServerError, ServerProcess, free_port

# A server that starts a child that ignores SIGTERM, prints the child's id, then answers every GET with 200.
STAND_IN = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ROOT = Path(__file__).resolve().parent.parent


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def stand_in(tmp_path: Path, code: str, **options: float) -> ServerProcess:
    server = ServerProcess("no-model", log_path=tmp_path / "server.log", **options)  # type: ignore[arg-type]
    server.command = [sys.executable, "-c", code, str(server.port)]
    return server


def test_no_child_outlives_close(tmp_path: Path) -> None:
    with stand_in(tmp_path, STAND_IN) as server:
        assert server.alive and server.get("/health").status_code == 200
        child = int(server.log_text().split("child ")[1].split()[0])
        assert psutil.pid_exists(child)
    assert not server.alive and not running(child)


def test_no_child_outlives_a_killed_owner(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    owner = (
        "import os, signal, sys; from eval.serving import ServerProcess;"
        f"s = ServerProcess('no-model', log_path={str(log)!r});"
        f"s.command = [sys.executable, '-c', {STAND_IN!r}, str(s.port)];"
        "s.start(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", owner], cwd=ROOT, check=False)
    child = int(log.read_text().split("child ")[1].split()[0])
    deadline = time.monotonic() + 20
    while running(child):
        assert time.monotonic() < deadline, f"process {child} is still running"
        time.sleep(0.05)


def test_no_forked_server_outlives_a_killed_owner(tmp_path: Path) -> None:
    """The fork server first imports libraries. Its owner is gone when it forks."""
    (tmp_path / "slow_library.py").write_text("import time; time.sleep(3)")
    (tmp_path / "served.py").write_text("import time; time.sleep(600)")
    owner = (
        "import os, signal, threading; from eval.serving import ServerProcess; from tests import forked;"
        "forked.set_forkserver_preload(['slow_library']); ServerProcess.launch = forked.launch;"
        f"s = ServerProcess('no-model', log_path={str(tmp_path / 'log')!r});"
        "s.command[1:3] = ['-m', 'served', 'sglang.launch_server'];"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start(); s.start()"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "REASONCACHE_FORK": "1"}
    subprocess.run([sys.executable, "-c", owner], cwd=ROOT, env=env, check=False)
    deadline = time.monotonic() + 20
    while left := [p.pid for p in psutil.process_iter(["environ"]) if str(tmp_path) in str(p.info)]:
        assert time.monotonic() < deadline, f"processes {left} are still running"
        time.sleep(0.05)


SLEEP = "import os, time; print('pid', os.getpid(), {!r}, flush=True); time.sleep(600)"
TAKEN = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1)"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os, sys; print('pid', os.getpid(), 'no such flag: --xyz'); sys.exit(2)",
         "(?s)exited with status 2.*no such flag: --xyz"),
        (SLEEP.format(""), "not ready after 2 s"),
        (SLEEP.format(TAKEN), "failed: error while attempting to bind"),
    ],
)  # fmt: skip
def test_a_start_that_fails_tells_why_and_ends_all(code: str, told: str, tmp_path: Path) -> None:
    server = stand_in(tmp_path, code, start_timeout_s=2.0 if "2 s" in told else 600.0)
    with pytest.raises(ServerError, match=told):
        server.start()
    assert not psutil.pid_exists(int(server.log_text().split()[1]))


def test_flags_and_variables_of_the_caller_win(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ServerProcess("m", flags=["--max-total-tokens=99", "--random-seed", "7"]).command
    assert command.count("--random-seed") == 1 and "--max-total-tokens" not in command
    assert command[-3:] == ["--max-total-tokens=99", "--random-seed", "7"]
    # The environment of a server on the CPU hides GPUs and names our platform.
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    env = ServerProcess("m", env={"OMP_NUM_THREADS": "2", "HOME": None}).env
    told = {"SGLANG_PLATFORM": "reasoncache_cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert (told | {"OMP_NUM_THREADS": "2"}).items() <= env.items()
    assert "HOME" not in env and "SGLANG_USE_CPU_ENGINE" not in env
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert "SGLANG_PLATFORM" not in ServerProcess("m", device="cuda").env


def test_only_the_needed_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    others = serving._other_architectures(str(tmp_path)).split(",")
    assert "llama" in others and "qwen3" not in others
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert serving._other_architectures(str(tmp_path)) == ""


def test_free_port_is_below_the_ephemeral_range() -> None:
    low = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    port = free_port()
    assert port < int(low)
    socket.create_server(("127.0.0.1", port)).close()
