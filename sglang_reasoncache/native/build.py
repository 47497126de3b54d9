# SPDX-License-Identifier: Apache-2.0
"""Compiles ``csrc/`` into one shared library, once for each content, compiler and CPU.

``CXX`` chooses the compiler, ``REASONCACHE_CACHE_DIR`` the folder of the
results (default: ``sglang-reasoncache`` under ``XDG_CACHE_HOME`` or
``~/.cache``), ``REASONCACHE_SANITIZE=1`` a build with AddressSanitizer and
UndefinedBehaviorSanitizer for the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_reasoncache.native import generated

_PACKAGE = Path(__file__).resolve().parent.parent
_NAME = "libreasoncache.so"
_TIMEOUT_SECONDS = 600
_COMPILERS = ("c++", "g++", "clang++")
# No contraction: similarities must come out bit for bit as in the Python twin.
# Kernels that want fused multiply-add ask for it in their source.
_FLAGS = ("-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-g1")
_OPTIMISED = ("-O3", "-march=native")
_SANITIZED = ("-O1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined")


class NativeUnavailable(RuntimeError):
    """The library cannot be built or loaded here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; builds it when there is no build of this source yet.

    Safe to call from several processes at once: one builds, the others wait.

    Raises:
        NativeUnavailable: no sources, no compiler, or an error of the compiler.
    """
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"cannot load {path}: {error}") from error


def build() -> Path:
    """Path of the library for this source, compiler and CPU; compiles it if need be.

    Raises:
        NativeUnavailable: see :func:`library`.
    """
    root = _source_root()
    sources = sorted(root.rglob("*.cpp"))
    if not sources:
        raise NativeUnavailable(f"no C++ sources in {root}")
    compiler = _compiler()
    flags = (*_FLAGS, *(_SANITIZED if sanitized() else _OPTIMISED))
    key = _key(root, compiler, flags)
    with _cache_folder() as cache:
        target = cache / key / _NAME
        if target.is_file():
            return target
        try:
            with (cache / f"{key}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.is_file():
                    _compile(root, sources, compiler, flags, target)
        except OSError as error:
            raise NativeUnavailable(f"cannot build in {cache}: {error}") from error
    return target


def sanitized() -> bool:
    """Whether this process asks for the AddressSanitizer build."""
    return os.environ.get("REASONCACHE_SANITIZE", "0") not in ("", "0")


def _source_root() -> Path:
    """``csrc`` inside the installed package, or beside it in a checkout."""
    for root in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if root.is_dir():
            return root
    raise NativeUnavailable(f"no folder csrc in {_PACKAGE} or beside it")


def _compiler() -> list[str]:
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in _COMPILERS:
        if shutil.which(name):
            return [name]
    raise NativeUnavailable(f"no C++ compiler on PATH (looked for {', '.join(_COMPILERS)}; or CXX)")


def _key(root: Path, compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Hash of everything that decides what the library holds."""
    digest = hashlib.sha256()
    files = [*root.rglob("*.cpp"), *root.rglob("*.h"), *generated.inputs()]
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    for part in (
        *compiler,
        _run([*compiler, "--version"]),
        *flags,
        _cpu(),
        sys.version,
        unicodedata.unidata_version,
    ):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by unlike machines."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def _cache_folder() -> Iterator[Path]:
    """A folder that only this user can write: what is in it gets executed."""
    given = os.environ.get("REASONCACHE_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(given) if given else Path(base) / "sglang-reasoncache"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        usable = (
            status.st_uid == os.getuid()
            and not status.st_mode & 0o022
            and os.access(folder, os.W_OK)
        )
    except OSError:
        usable = False
    if not usable:
        # Kept until the process ends; the library stays mapped after that.
        folder = Path(_private_folder().name)
    yield folder


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sglang-reasoncache-")


def _compile(
    root: Path, sources: Sequence[Path], compiler: Sequence[str], flags: Sequence[str], target: Path
) -> None:
    """Compile in a scratch folder, then move the result in place: nobody loads half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".build-") as scratch:
        folder = Path(scratch)
        for name, text in generated.headers().items():
            (folder / name).write_text(text, encoding="utf-8")
        include = (f"-I{root}", f"-I{scratch}")
        objects = [folder / f"{i}.o" for i in range(len(sources))]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
            list(
                workers.map(
                    lambda pair: _run(
                        [*compiler, *flags, *include, "-c", str(pair[0]), "-o", str(pair[1])]
                    ),
                    zip(sources, objects, strict=True),
                )
            )
        output = folder / _NAME
        _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(output)])
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(output, target)


def _run(command: Sequence[str]) -> str:
    """Standard output of a compiler call.

    Raises:
        NativeUnavailable: it failed; the message ends with what it said.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NativeUnavailable(
            f"{shlex.join(command)} failed ({done.returncode}):\n{done.stderr[-4000:]}"
        )
    return done.stdout
