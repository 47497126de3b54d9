# SPDX-License-Identifier: Apache-2.0
"""Run code that a model wrote, locked away: no network, no files, bounded time and memory.

The locks are the kernel's (``jail.py``): namespaces for network, processes and files, a system
call filter, resource limits, a user without rights. Where the kernel does not give them to us
nothing runs at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_JAIL = Path(__file__).with_name("jail.py")
_MAX_PROGRAM_CHARS = 1 << 20
_START_S = 60.0
_END_S = 10.0


class SandboxError(RuntimeError):
    """No program can be run safely here; the message says what the kernel refuses."""


@dataclass(frozen=True)
class Limits:
    """What one program may use.

    Attributes:
        wall_s: seconds from its start, after which everything is killed.
        cpu_s: seconds of processor time of each process.
        memory_bytes: address space of each process.
        processes: processes and threads at once.
        file_bytes: size of each file.
        disk_bytes: all files together; they live in memory and are gone afterwards.
        output_bytes: of standard output and error together.
    """

    wall_s: float = 20.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 8
    file_bytes: int = 16 << 20
    disk_bytes: int = 32 << 20
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: it ran to its last line without an exception.
        note: why not, "" if it passed.
    """

    passed: bool
    note: str = ""


def run(program: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program to its end and say whether it got there.

    Ending early by ``exit()`` is no pass. A program made to fool this check can (it shares an
    interpreter with what reports the end); it cannot do anything else.

    Raises:
        SandboxError: the jail cannot be built.
    """
    if len(program) > _MAX_PROGRAM_CHARS:
        return Outcome(False, f"longer than {_MAX_PROGRAM_CHARS} characters")
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="sandbox-") as root, contextlib.ExitStack() as files:
        job = _sealed(json.dumps({"token": token, "program": program}).encode())
        files.callback(os.close, job)
        status, status_end = os.pipe()
        files.callback(os.close, status)
        try:
            process = _start(job, status_end, root, limits)
        finally:
            os.close(status_end)
        try:
            _await_start(status)
            output, ended = _drain(process, time.monotonic() + limits.wall_s, limits.output_bytes)
        finally:
            _end(process)
    if not ended and len(output) > limits.output_bytes:
        return Outcome(False, f"printed more than {limits.output_bytes} bytes")
    if not ended:
        return Outcome(False, f"ran longer than {limits.wall_s:g} s")
    _, found, word = output[-2048:].rpartition(token.encode())
    if not found:
        return Outcome(False, "ended before its last line")
    text = word.decode("utf-8", "replace").strip()
    return Outcome(True) if text == "passed" else Outcome(False, text.removeprefix("failed "))


def check() -> None:
    """Find out whether programs can be run, and whether they are cut off from the network.

    Raises:
        SandboxError: they cannot, or are not.
    """
    outcome = run("import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    pass\n"
                  "else:\n    raise RuntimeError('sockets can be made')\n")  # fmt: skip
    if not outcome.passed:
        raise SandboxError(f"the sandbox does not hold: {outcome.note}")


def _sealed(content: bytes) -> int:
    """A file in memory that nobody can change any more, ready to be read."""
    handle = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(handle, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(handle, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
    return handle


def _start(job: int, status: int, root: str, limits: Limits) -> subprocess.Popen[bytes]:
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"code runs on Linux only, not on {sys.platform!r}")
    settings = {
        "status": status,
        "root": os.path.realpath(root),
        "disk_bytes": limits.disk_bytes,
        "resources": {
            "CORE": 0,
            "CPU": limits.cpu_s,
            "FSIZE": limits.file_bytes,
            "NPROC": limits.processes,
            "NOFILE": 64,
            "AS": limits.memory_bytes,
        },
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_JAIL), json.dumps(settings)],
        stdin=job,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[status],
        env={},
        cwd="/",
        start_new_session=True,
    )


def _await_start(status: int) -> None:
    deadline = time.monotonic() + _START_S
    message = b""
    while len(message) < 1000:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([status], [], [], left)[0]:
            raise SandboxError(f"the sandbox did not start within {_START_S:g} s")
        part = os.read(status, 1000)
        if not part:
            break
        message += part
    if message != b"ready":
        reason = message.decode("utf-8", "replace") or "its process ended"
        raise SandboxError(f"no sandbox can be made here: {reason}")


def _drain(process: subprocess.Popen[bytes], deadline: float, limit: int) -> tuple[bytes, bool]:
    """Output until everything inside has ended (True), or until a limit is passed (False)."""
    assert process.stdout is not None
    pipe, output = process.stdout.fileno(), bytearray()
    while len(output) <= limit:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return bytes(output), False
        part = os.read(pipe, 1 << 16)
        if not part:
            return bytes(output), True
        output += part
    return bytes(output), False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left, and wait until nothing is: every process inside holds the pipe."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _END_S
    assert process.stdout is not None
    with process.stdout as pipe:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise SandboxError(f"a program was still running {_END_S:g} s after it was killed")
            if not os.read(pipe.fileno(), 1 << 16):
                return
