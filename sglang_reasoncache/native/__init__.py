# SPDX-License-Identifier: Apache-2.0
"""Builds and loads the C++ library of ``csrc/``. Calls go through ctypes, which releases the
interpreter lock.

The first use compiles the library, once for each combination of sources, ``CXX`` and CPU. The environment
variable ``CXX`` chooses the compiler. Without ``CXX`` and a compiler on PATH, the package ``ziglang`` compiles.
``REASONCACHE_CACHE_DIR`` is the folder for built libraries (default: ``sglang-reasoncache`` under
``XDG_CACHE_HOME`` or ``~/.cache``).
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_NAME = "libreasoncache.so"
_TIMEOUT_SECONDS = 600
_COMPILERS = ("c++", "g++", "clang++")
# Floating-point contraction is off: kernels that want fused multiply-add call it in their source.
_FLAGS = ("-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-g1")
_OPTIMISED = ("-O3", "-march=native")


class NativeUnavailable(RuntimeError):
    """The library cannot be built or loaded here. The message says why."""


# Result of the first call of ``library``. If this call failed, later calls do not try again.
_outcome: ctypes.CDLL | NativeUnavailable | None = None


def library() -> ctypes.CDLL:
    """The loaded library. The library is built first if there is no build of the current sources yet.

    Several processes may call this at once: one of them builds, the others wait.

    Raises:
        NativeUnavailable: no sources, no compiler, or the compiler or the loader failed.
    """
    global _outcome
    if _outcome is None:
        try:
            _outcome = ctypes.CDLL(str(_build(_source_root())))
        except NativeUnavailable as error:
            _outcome = error
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _outcome = NativeUnavailable(f"cannot build or load the native library: {error}")
    if isinstance(_outcome, NativeUnavailable):
        raise _outcome
    return _outcome


def _build(root: Path) -> Path:
    """Path of the library for the sources in ``root`` and this CPU; compiles it if need be."""
    flags = (*_FLAGS, *_OPTIMISED)
    key = _key(root, flags)
    cache = _cache_folder()
    if cache is not None and (cache / key / _NAME).is_file():
        return cache / key / _NAME
    if cache is None or not os.access(cache, os.W_OK):
        # The private folder is deleted when the process ends. Once loaded, a library no longer needs its file.
        cache = Path(_private_folder().name)
    target = cache / key / _NAME
    compiler = _compiler()
    with (cache / f"{key}.lock").open("w") as lock:
        # The wait is bounded, because the process that holds the lock stops a compiler that hangs.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _compile(root, [*compiler, *flags], target)
    return target


def _source_root() -> Path:
    """The folder ``csrc``: inside an installed package, but beside the package in a checkout."""
    for root in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if root.is_dir():
            return root
    raise NativeUnavailable(f"no folder csrc in {_PACKAGE} or beside it")


def _compiler() -> list[str]:
    given = os.environ.get("CXX") or next(filter(shutil.which, _COMPILERS), "")
    if given:
        return shlex.split(given)
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise NativeUnavailable(
        f"no C++ compiler on PATH (looked for {', '.join(_COMPILERS)}; or CXX), and no Python package "
        "ziglang"
    )


def _key(root: Path, flags: Sequence[str]) -> str:
    """Hash of what a build depends on. The hash needs no compiler, so that a machine without a compiler also
    finds a finished build."""
    digest = hashlib.sha256("\0".join((os.environ.get("CXX", ""), *flags, _cpu())).encode())
    for path in sorted([*root.rglob("*.cpp"), *root.rglob("*.h")]):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _cpu() -> str:
    """The CPU's features. ``-march=native`` depends on them, and different machines may share a home folder."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor() or platform.machine()


def _cache_folder() -> Path | None:
    """The folder for built libraries; None if it is unsafe or cannot be made. Its files are executed, so the
    folder is unsafe if neither this user nor root owns it, or if others can write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(os.environ.get("REASONCACHE_CACHE_DIR") or Path(base) / "sglang-reasoncache")
    if not folder.is_absolute():
        return None  # for example "~/.cache/...": the user has no home folder
    try:
        with contextlib.suppress(PermissionError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Links are resolved before the check, so the folder checked below is the folder used later.
        folder = folder.resolve(strict=True)
        status = folder.stat()
    except OSError:
        return None
    is_trusted = status.st_uid in (0, os.getuid())
    return folder if is_trusted and not status.st_mode & 0o022 else None


@functools.cache
def _private_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sglang-reasoncache-")


def _compile(root: Path, compiler: Sequence[str], target: Path) -> None:
    """Compile in a scratch folder, then rename the result, so that no process loads half a file."""
    sources = map(str, sorted(root.rglob("*.cpp")))
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".build-") as scratch:
        output = f"{scratch}/{_NAME}"
        command = [*compiler, f"-I{root}", "-shared", *sources, "-o", output]
        # zig is told to keep its caches in the scratch folder. By default they are in the home folder.
        caches = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), scratch)
        done = subprocess.run(
            command,
            capture_output=True,
            env={**os.environ, **caches},
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
        )
        if done.returncode:
            raise NativeUnavailable(
                f"{shlex.join(command)} failed ({done.returncode}):\n{done.stderr[-4000:]}"
            )
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(output, target)
