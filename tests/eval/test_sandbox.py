# SPDX-License-Identifier: Apache-2.0
"""Tests the sandbox with the worst code that a model might write: it fails, nothing gets out, nothing is left
behind. Skipped where bubblewrap is missing."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.tasks import grading, sandbox
from eval.tasks.sandbox import Limits, Outcome, SandboxError, run

LIMITS = Limits(wall_s=6.0, cpu_s=1)


@pytest.fixture(scope="module", autouse=True)
def _available() -> None:
    try:
        sandbox.check()
    except SandboxError as error:
        pytest.skip(str(error))


def _jailed() -> set[str]:
    """Ids of the processes in a process namespace below ours."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if re.search(r"^NSpid:\s+\d+\s+\d", status.read_text(), re.MULTILINE):
                found.add(status.parent.name)
    return found


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = _jailed()
    yield
    deadline = time.monotonic() + 10
    while (left := _jailed() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _run(program: str) -> Outcome:
    begin = time.monotonic()
    outcome = run(program, LIMITS)
    assert time.monotonic() - begin < LIMITS.wall_s + 20
    return outcome


def test_program_that_reaches_its_end_passes() -> None:
    source = """
import collections, dataclasses, hashlib, itertools, math, re, typing
@dataclasses.dataclass
class Point:
    x: int
print("noise")
open("/tmp/mine", "w").write("x")
assert hashlib.md5(b"x").hexdigest().startswith("9dd4") and Point(1).x == 1
"""
    assert _run(source) == _run("") == Outcome(True)
    outcome = run("import time; time.sleep(1000)", Limits(wall_s=1.5))
    assert outcome == Outcome(False, "ran longer than 1.5 s")
    # Programs do not see each other.
    assert _run("open('/tmp/left', 'w')").passed
    assert _run("import os\nassert 'left' not in os.listdir('/tmp')").passed


ENDS = [
    ("assert 1 == 2, 'unequal'", "AssertionError"),
    ("def broken(:", "SyntaxError"),
    ("raise SystemExit(0)", "SystemExit"),
    ("import os; os._exit(0)", "ended before"),
    ("import ctypes; ctypes.string_at(0)", "ended before"),
    ("def f(): f()\nf()", "RecursionError"),
    ("x = '\ud800'", ""),
    ("import os, signal\nos.kill(0, signal.SIGKILL)", ""),
    # Greed.
    ("while True: pass", "ended before"),
    ("import threading\nwhile True: threading.Thread(target=lambda: 9**9**9).start()", ""),
    ("x = bytearray(1 << 34)", "MemoryError"),
    ("import os\nwhile True: os.fork()", "PermissionError"),
    ("import os\nos.setsid()\nif os.fork(): raise ValueError\nwhile True: pass", ""),
    ("while True: print('x' * 10000)", ""),
    ("open('/tmp/big', 'wb').write(bytes(64 << 20))", "OSError"),
    ("for i in range(99): open(f'/tmp/{i}', 'wb').write(bytes(8 << 20))", "OSError"),
]


@pytest.mark.parametrize(("program", "note"), ENDS, ids=range(len(ENDS)))
def test_a_program_that_fails(program: str, note: str) -> None:
    outcome = _run(program)
    assert not outcome.passed
    assert note in outcome.note


def test_network_is_denied() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert "PermissionError" in _run(connect).note
        # By system call, past Python's module, every family of addresses.
        every = "libc.socket(family, kind, 0) == -1 for family in range(46) for kind in (1, 2, 3)"
        raw = f"import ctypes\nlibc = ctypes.CDLL(None)\nassert all({every})"
        assert _run(raw) == Outcome(True)
        ring = "import ctypes\nassert ctypes.CDLL(None).syscall(425, 1, 0) == -1"
        assert _run(ring) == Outcome(True)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


def test_files_outside_cannot_be_seen_or_written(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    assert "FileNotFoundError" in _run(f"open({str(secret)!r})").note
    for path in (str(tmp_path / "made"), "/usr/made", "/lib/made"):
        assert not _run(f"open({path!r}, 'w')").passed and not Path(path).exists()
    hidden = ("/sys", "/home", "/var", "/etc/passwd")
    assert _run(f"import os\nassert not any(map(os.path.exists, {hidden}))") == Outcome(True)
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_no_secrets_and_no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    source = """
import os, ctypes
assert "HF_TOKEN" not in os.environ and "secret" not in str(os.environ)
assert os.getuid() == os.geteuid() == 65534
libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x10000000) == -1                        # a user namespace of its own
assert libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"") == -1
assert libc.setuid(0) == -1
for number in range(3, 64):
    try:
        os.fstat(number)
    except OSError:
        continue
    raise ValueError(f"{number} is open")
"""
    assert _run(source) == Outcome(True)


def test_what_is_not_locked_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel refuses namespaces, bubblewrap ends before the program is read."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxError, match="only in bubblewrap, which is not installed"):
        run("print('ran')")
    refusing = tmp_path / "bwrap"
    fault = "No permissions to create new namespace"
    refusing.write_text(f"#!/bin/sh\necho 'bwrap: {fault}' >&2; exit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(SandboxError, match=fault):
        run("print('ran')")


def test_functions_are_judged_by_their_tests() -> None:
    doc = {"code": "import math\ndef f(x):\n    pass\n", "entry_point": "f"}
    doc["test"] = "def check(f):\n    assert f(4) == 2\n"
    future = "from __future__ import annotations\ndef f(x):\n    return math.isqrt(x)\n"
    wrong = dict.fromkeys(("def f(x): return 1", "", "#" * 200_000), 0.0)
    for code, score in ({future: 1.0} | wrong).items():
        assert grading.passes_tests(doc, [code]) == {"score": score}
