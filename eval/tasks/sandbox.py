# SPDX-License-Identifier: Apache-2.0
"""Run code that a model wrote under bubblewrap: no network, no files, bounded time and memory."""

import contextlib
import json
import os
import platform
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TAIL_BYTES = 2048
_END_S = 10.0
# What runs inside. The names it needs are taken before the program can replace them.
_RUNNER = """
import json, os, resource, sys, types
job = json.loads(sys.stdin.buffer.read())
for name, value in job.pop("limits").items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
write, leave, token = os.write, os._exit, job.pop("token")
write(1, (token + " ready\\n").encode())
module = sys.modules["solution"] = types.ModuleType("solution")
word = "passed"
try:
    exec(compile(job.pop("program"), "solution.py", "exec"), module.__dict__)
except BaseException as error:
    word = "failed " + type(error).__name__
try:
    sys.stdout.flush()
finally:
    write(1, ("\\n" + token + " " + word).encode())
    leave(0)
"""


class SandboxError(RuntimeError):
    """No program can be run safely here; the message says why."""


@dataclass(frozen=True)
class Limits:
    """What one program may use: seconds and bytes."""

    wall_s: float = 20.0
    cpu_s: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 32 << 20


@dataclass(frozen=True)
class Outcome:
    """How a program ended; ``note`` says why it did not pass."""

    passed: bool
    note: str = ""


def run(program: str, limits: Limits = Limits()) -> Outcome:
    """Run a Python program to its end and say whether it got there without an exception or
    ``exit()``. A program made to fool this check can (it shares an interpreter with what reports the
    end), and no more. Raises SandboxError: bubblewrap is missing or cannot make namespaces."""
    token = secrets.token_hex(16)
    # Output goes to a file, whose size is limited as that of any other.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as rules:
        rules.write(_filter())
        rules.seek(0)
        alive, alive_inside = os.pipe()
        python = [sys.executable, "-I", "-S", "-B", "-c", _RUNNER]
        command = [*_command(limits, rules.fileno(), alive_inside), *python]
        pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=output, stderr=output)
        pipes["pass_fds"] = [rules.fileno(), alive_inside]
        process = subprocess.Popen(command, env={}, cwd="/", start_new_session=True, **pipes)
        os.close(alive_inside)
        bounds = dict(CORE=0, CPU=limits.cpu_s, FSIZE=limits.file_bytes, NOFILE=64)
        bounds["AS"] = limits.memory_bytes
        job = {"token": token, "program": program, "limits": bounds}
        try:
            process.communicate(json.dumps(job).encode(), timeout=limits.wall_s)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            # With bubblewrap everything inside dies; the pipe ends with the last of it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            select.select([alive], [], [], _END_S)
            os.close(alive)
        output.seek(0)
        head = output.read(_TAIL_BYTES)
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        tail = output.read(_TAIL_BYTES)
    if f"{token} ready".encode() not in head:
        raise SandboxError(f"bubblewrap: {head.decode(errors='replace')[:500] or 'did not start'}")
    if not in_time:
        return Outcome(False, f"ran longer than {limits.wall_s:g} s")
    word = tail.rpartition(token.encode())[2].decode(errors="replace").strip()
    if word == "passed":
        return Outcome(True)
    known = word.startswith("failed ")
    return Outcome(False, word.removeprefix("failed ") if known else "ended before its last line")


def check() -> None:
    """Find out whether programs can be run, and whether they are cut off from the network. Raises
    SandboxError: they cannot, or are not."""
    probe = "import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    pass\n"
    outcome = run(probe + "else:\n    raise RuntimeError('sockets can be made')\n")
    if not outcome.passed:
        raise SandboxError(f"the sandbox does not hold: {outcome.note}")


def _command(limits: Limits, rules: int, alive: int) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bubblewrap is not installed (Debian: apt-get install bubblewrap)")
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    command += ["--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    command += ["--clearenv", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    # Before the folders that are shown: a Python below /tmp would be hidden else.
    command += ["--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
    # A virtual environment's interpreter is a link into another's.
    python = [sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent)]
    for folder in dict.fromkeys(("/usr", "/lib", "/lib64", "/etc/ld.so.cache", *python)):
        command += ["--ro-bind-try", folder, folder] if folder != "/" else []
    command += ["--seccomp", str(rules), "--sync-fd", str(alive)]
    return [*command, "--chdir", "/tmp"]


def _filter() -> bytes:
    """System calls but ``socket`` (vsock is in no network namespace), new processes and threads."""
    machines = {
        "x86_64": (0xC000003E, (41, 56, 57, 58, 435)),
        "aarch64": (0xC00000B7, (198, 220, 435)),
    }
    if platform.machine() not in machines:
        raise SandboxError(f"code cannot be run safely on {platform.machine()!r}")
    audit, refused = machines[platform.machine()]
    load, equal, least, give = 0x20, 0x15, 0x35, 0x06
    allow, kill, refuse = 0x7FFF0000, 0x80000000, 0x00050001
    # Another architecture's numbers (and x32's, from 1 << 30 on) would mean other calls.
    program = [(load, 0, 0, 4), (equal, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(least, 0, 1, 1 << 30), (give, 0, 0, kill)]
    for call in refused:
        program += [(equal, 0, 1, call), (give, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *line) for line in [*program, (give, 0, 0, allow)])
