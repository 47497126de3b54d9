# SPDX-License-Identifier: Apache-2.0
"""Runs real SGLang servers as subprocesses, for measurements and tests."""

import contextlib
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import httpx
import psutil

from sglang_reasoncache.cpu.activate import PLATFORM_NAME

#: The number of KV slots of a CPU server, unless its flags set it. SGLang's own default fills most of the RAM.
DEFAULT_KV_SLOTS = 16384
#: The name that requests give as ``model``.
MODEL_NAME = "default"

LEAN_START = Path(__file__).with_name("lean_start")
_TAIL_LINES = 60
_LINE_WIDTH = 300
# A server that logs this line has failed, but does not exit at once: SGLang polls its own port for two minutes.
_PORT_TAKEN = "error while attempting to bind on address"


#: SGLang's own checks. After each batch, and when idle, every slot must be accounted for. No page may be
#: free while a request holds it. At level 1 the first check logs nothing until a slot is missing.
STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}

_BAD_LOG_WORDS = ("Traceback (most recent call last)", "leak detected", "Leak Detected")


class ServerError(RuntimeError):
    """A server did not start, is not running, or survived SIGKILL. The message may quote the end of its log."""


class ServerProcess:
    """Runs ``python -m sglang.launch_server`` in a ``with`` block, or from :meth:`start` to :meth:`close`.
    ``flags`` override our defaults. ``env`` sets variables; None removes a variable. Device ``"cpu"`` hides all
    GPUs and uses this project's CPU platform; ``"cuda"`` lets SGLang choose platform and attention backend."""

    #: Starts the main process. Tests replace this, because they start many servers.
    launch: ClassVar[Callable[..., Any]] = subprocess.Popen

    def __init__(
        self, model_path: str | Path, *, flags: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None, log_path: str | Path | None = None,
        device: Literal["cpu", "cuda"] = "cpu", start_timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        self.model_path = str(model_path)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_timeout_s = start_timeout_s
        self.command = _command(self.model_path, self.port, device, flags)
        self.env = _environment(self.model_path, device, env or {})
        temporary = f"reasoncache-server-{os.getpid()}-{self.port}.log"
        self.log_path = Path(log_path or Path(tempfile.gettempdir()) / temporary)
        # SGLang acts on SIGTERM after up to 5 s, but then lets its schedulers release the GPU. CPU servers get
        # SIGINT first, which acts at once; their logs then end with tracebacks of KeyboardInterrupt.
        self._end = (signal.SIGINT, signal.SIGTERM) if device == "cpu" else (signal.SIGTERM,)
        self._process: Any = None
        self._guard: subprocess.Popen[bytes] | None = None
        # With trust_env, httpx could send loopback traffic to a proxy that an environment variable names.
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.Client(base_url=self.url, timeout=600.0, trust_env=False, limits=limits)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start the server and wait until it is ready. Raises ServerError if it fails or takes too long."""
        deadline = time.monotonic() + self.start_timeout_s
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            # A new session keeps Ctrl-C in a terminal from the server, and lets close() kill all its children.
            options = dict(env=self.env, start_new_session=True, stdin=subprocess.DEVNULL)
            self._process = type(self).launch(self.command, stdout=log, stderr=log, **options)
        self._guard = kill_when_we_die(self._process.pid)
        try:
            while not self._ready():
                self.check_alive()
                if _PORT_TAKEN in self.log_text():
                    raise ServerError(self._report(f"failed: {_PORT_TAKEN}"))
                if time.monotonic() > deadline:
                    late = f"was not ready after {self.start_timeout_s:g} s"
                    raise ServerError(self._report(late))
                time.sleep(0.25)
        except BaseException:
            self.close()
            raise
        return self

    def _ready(self) -> bool:
        try:
            return self._http.get("/health", timeout=30.0).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the server's main process. Raises :class:`ServerError` if it is not running."""
        self.check_alive()
        assert self._process is not None
        return self._process.pid

    def check_alive(self) -> None:
        """Raise :class:`ServerError` if the server is not running, with the end of the log if it has exited."""
        if self._process is None:
            raise ServerError(f"SGLang server on port {self.port} was never started, or closed")
        if self._process.poll() is not None:
            raise ServerError(self._report(f"exited with status {self._process.returncode}"))

    def _report(self, what: str) -> str:
        # Lines are cut, because SGLang prints all of its several hundred settings in one line.
        lines = self.log_text().splitlines()[-_TAIL_LINES:]
        tail = "\n".join(line[:_LINE_WIDTH] for line in lines)
        command = shlex.join(self.command)
        return f"SGLang server {what}\n  {command}\n--- end of {self.log_path} ---\n{tail}"

    def close(self, grace_s: float = 15.0) -> None:
        """Ask the server to exit, wait up to ``grace_s`` seconds, then kill the rest of its process group."""
        self._http.close()
        process = self._process
        self._process = None
        if process is None:
            return
        if process.poll() is None:
            for number in self._end:
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
        _kill_group(process.pid)
        if self._guard is not None:
            # Otherwise the guard could later kill an unrelated process group that has got the same id.
            self._guard.kill()
            self._guard.communicate()
        process.wait()

    def log_text(self, since: int = 0) -> str:
        """The output so far, from byte ``since`` on (see :meth:`log_size`)."""
        return self.log_path.read_bytes()[since:].decode(errors="replace")

    def log_size(self) -> int:
        """The size of the output in bytes. Pass it to :meth:`log_text` later to read only what came after."""
        return self.log_path.stat().st_size

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._http.get(path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        """POST ``json`` to ``path``; ``options`` are those of :meth:`httpx.Client.post`."""
        return self._http.post(path, json=json, **options)


def wait_until_idle(server: ServerProcess, timeout_s: float = 120.0) -> None:
    """Wait until SGLang's counters show no running or waiting request and no held slot. A slot is held unless
    it is free or evictable, so a leaked slot or a lock that is never released makes the check fail."""
    deadline = time.monotonic() + timeout_s
    while True:
        server.check_alive()
        response = server.get("/v1/loads", params={"include": "all"})
        response.raise_for_status()
        names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        loads = response.json()["loads"]
        busy = {name: load[name] for load in loads for name in names if load[name]}
        if not busy:
            return
        if time.monotonic() > deadline:
            raise ServerError(f"not idle after {timeout_s:g} s: {busy}")
        time.sleep(0.1)


def log_errors(log: str) -> str:
    """The part of a server's log that shows a traceback or a leak: 40 lines from there on, or ""."""
    for word in _BAD_LOG_WORDS:
        if word in log:
            return "".join(log[log.find(word) :].splitlines(keepends=True)[:40])
    return ""


def free_port() -> int:
    """A TCP port that was free a moment ago. It is below the kernel's ephemeral range, because an outgoing
    connection could take a port of that range before a server does."""
    top = 32768
    with contextlib.suppress(OSError, ValueError):
        top = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low = 10000 if top > 12000 else 1024
    for _ in range(200):
        port = random.SystemRandom().randrange(low, max(top, low + 1000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free TCP port found on 127.0.0.1 between {low} and {top}")


def _command(model_path: str, port: int, device: str, flags: Sequence[str]) -> list[str]:
    defaults = {"--served-model-name": [MODEL_NAME], "--random-seed": ["0"]}
    if device == "cpu":
        defaults |= {"--max-total-tokens": [str(DEFAULT_KV_SLOTS)], "--device": ["cpu"]}
        # Without this flag an idle scheduler spins and takes CPU time from the clients.
        defaults |= {"--sleep-on-idle": []}
    names = {flag.split("=", 1)[0] for flag in flags}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model_path]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for flag, values in defaults.items():
        if flag not in names:
            command += [flag, *values]
    return [*command, *flags]


def _environment(
    model_path: str, device: str, overrides: Mapping[str, str | None]
) -> dict[str, str]:
    env = dict(os.environ)
    env["PYTHONUNBUFFERED"] = "1"
    # With this variable, all three processes of a server would compile some thousand modules at every start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # The server sends its warm-up request to itself, not through a proxy.
    env["NO_PROXY"] = env["no_proxy"] = "127.0.0.1,localhost"
    if Path(model_path).is_dir():
        env["HF_HUB_OFFLINE"] = env["TRANSFORMERS_OFFLINE"] = "1"
    if device == "cpu":
        env.pop("SGLANG_USE_CPU_ENGINE", None)
        env["SGLANG_PLATFORM"] = PLATFORM_NAME
        env["CUDA_VISIBLE_DEVICES"] = ""
        # In small tensor operations, waking threads takes more time than the threads save.
        env.setdefault("OMP_NUM_THREADS", "1")
        paths = (str(LEAN_START), env.get("PYTHONPATH"))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        env["SGLANG_DISABLED_MODEL_ARCHS"] = _other_architectures(model_path)
    return {name: value for name, value in {**env, **overrides}.items() if value is not None}


def _other_architectures(model_path: str) -> str:
    """Names of SGLang's model modules that the model does not need; importing them takes seconds."""
    config = Path(model_path) / "config.json"
    spec = importlib.util.find_spec("sglang")
    if not config.is_file() or spec is None or spec.origin is None:
        return ""
    needed = json.loads(config.read_text()).get("model_type")
    files = (Path(spec.origin).parent / "srt" / "models").glob("*.py")
    modules = sorted(file.stem for file in files if file.stem != "__init__")
    # If no module has the model type's name, all are loaded.
    return ",".join(m for m in modules if m != needed) if needed in modules else ""


def kill_when_we_die(group: int) -> subprocess.Popen[bytes]:
    """Starts a guard: a shell that kills a process group once this process is gone. The shell reads a
    pipe until it closes. Only this process can write to the pipe, so even SIGKILL to this process closes it."""
    pipes: dict[str, Any] = dict(
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    command = ["/bin/sh", "-c", f"read line; kill -s KILL -- -{group}"]
    return subprocess.Popen(command, start_new_session=True, **pipes)


def _kill_group(group: int, timeout_s: float = 10.0) -> None:
    """Kill a process group and wait until all its processes are gone or zombies."""
    deadline = time.monotonic() + timeout_s
    living = [group]
    while living:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        living = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process.pid)
        if living and time.monotonic() > deadline:
            raise ServerError(f"processes {living} survived SIGKILL")
        time.sleep(0.05 if living else 0)
