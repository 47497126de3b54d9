# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs that a model wrote under bubblewrap: no network, no files, limited time and memory."""

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

_TAIL_BYTES = 2048
_END_S = 10.0
# What runs inside. It takes the names that it needs before the program can replace them.
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
#: Machine -> its number for seccomp, and the numbers of ``socket`` (vsock is in no network namespace),
#: ``io_uring_setup`` (makes sockets without ``socket``), and what makes processes and threads.
_CALLS = {
    "x86_64": (0xC000003E, (41, 56, 57, 58, 425, 435)),
    "aarch64": (0xC00000B7, (198, 220, 425, 435)),
}
# Operations of a seccomp filter (classic BPF) and what it may answer.
_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_LEAST = 0x35
_ANSWER = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_REFUSE = 0x00050001


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


_DEFAULT = Limits()


@dataclass(frozen=True)
class Outcome:
    """How a program ended. ``note`` says why it did not pass."""

    passed: bool
    note: str = ""


def run(program: str, limits: Limits = _DEFAULT) -> Outcome:
    """Run a Python program, and say whether it reached its end without an exception or ``exit()``. A program
    that is made to fool this check can do that, because it shares an interpreter with what reports the end, and
    no more. Raises SandboxError if bubblewrap is missing or cannot make namespaces; then it has not run."""
    token = secrets.token_hex(16)
    bounds = {
        "CORE": 0,
        "CPU": limits.cpu_s,
        "FSIZE": limits.file_bytes,
        "NOFILE": 64,
        "AS": limits.memory_bytes,
    }
    job = json.dumps({"token": token, "program": program, "limits": bounds})
    # Output goes to a file, whose size is limited like that of any other.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as rules:
        rules.write(_filter())
        rules.seek(0)
        alive, alive_inside = os.pipe()
        python = [sys.executable, "-I", "-S", "-B", "-c", _RUNNER]
        process = subprocess.Popen(
            [*_command(limits, rules.fileno(), alive_inside), *python],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={},
            cwd="/",
            start_new_session=True,
            pass_fds=[rules.fileno(), alive_inside],
        )
        os.close(alive_inside)
        try:
            process.communicate(job.encode(), timeout=limits.wall_s)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            # With bubblewrap all processes inside die. The pipe ends when the last of them is gone.
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
    is_failure = word.startswith("failed ")
    return Outcome(
        False, word.removeprefix("failed ") if is_failure else "ended before its last line"
    )


def check() -> None:
    """Raises SandboxError, which says why, if programs cannot be run or are not cut off from the network."""
    probe = "import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    pass\n"
    outcome = run(probe + "else:\n    raise RuntimeError('sockets can be made')\n")
    if not outcome.passed:
        raise SandboxError(f"the sandbox does not hold: {outcome.note}")


def _command(limits: Limits, rules: int, alive: int) -> list[str]:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError(
            "code that a model wrote runs only in bubblewrap, which is not installed (Debian: apt-get install "
            "bubblewrap)"
        )
    command = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"]
    command += ["--new-session", "--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    command += ["--clearenv", "--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev"]
    # Mounted before the folders that are shown: otherwise it would hide a Python below /tmp.
    command += ["--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
    # The interpreter of a virtual environment is a link into another one's.
    python = [sys.base_prefix, sys.prefix, str(Path(sys.executable).resolve().parent)]
    for folder in dict.fromkeys(("/usr", "/lib", "/lib64", "/etc/ld.so.cache", *python)):
        command += ["--ro-bind-try", folder, folder] if folder != "/" else []
    command += ["--seccomp", str(rules), "--sync-fd", str(alive)]
    return [*command, "--chdir", "/tmp"]


def _filter() -> bytes:
    """A seccomp filter that refuses the system calls of ``_CALLS``."""
    if platform.machine() not in _CALLS:
        raise SandboxError(f"code cannot be run safely on {platform.machine()!r}")
    audit, refused = _CALLS[platform.machine()]
    program = [
        # The numbers of another architecture, and those of x32 (from 1 << 30 on), would mean other calls.
        (_LOAD, 0, 0, 4),
        (_IF_EQUAL, 1, 0, audit),
        (_ANSWER, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_IF_LEAST, 0, 1, 1 << 30),
        (_ANSWER, 0, 0, _KILL),
    ]
    for call in refused:
        program += [(_IF_EQUAL, 0, 1, call), (_ANSWER, 0, 0, _REFUSE)]
    program.append((_ANSWER, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *line) for line in program)
