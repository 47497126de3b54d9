# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run a test on each engine that has our kernels: C++ built for this CPU, C++ built for older
CPUs, and Triton, on a GPU or interpreted. For KV distances PyTorch is an engine too. In a process that
interprets Triton (see ``tests/triton_runs.py``) Triton is the only engine."""

import ctypes
import functools
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from sglang_reasoncache import native
from tests.triton_runs import INTERPRETED, on_device

#: Build for older x86 CPUs -> CPU flags that it needs. v3 has no AVX-512; x86-64 also has no AVX, F16C or FMA.
OLDER = {"x86-64-v3": {"avx2", "f16c", "fma"}, "x86-64": set[str]()}
NATIVE = () if INTERPRETED else ("native", *OLDER)
HOST = () if INTERPRETED else ("torch", *NATIVE)
ON_DEVICE = pytest.param("triton", marks=on_device)


def _engines(*params: Any) -> Any:
    @pytest.fixture(params=params)
    def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        """The name of the backend that a test passes to our operations; see :func:`use`."""
        return use(request.param, monkeypatch)

    return engine


backend = _engines(*NATIVE, ON_DEVICE)


def by_engine(
    cases: Iterable[Any], few: Iterable[Any], host: tuple[str, ...] = NATIVE
) -> list[Any]:
    """Parameters for pytest: pairs each engine of ``host``, and Triton, with each of ``cases``. Builds for
    older CPUs and interpreted Triton are paired with each of ``few`` instead."""
    return [
        pytest.param(engine, case, marks=on_device if engine == "triton" else ())
        for engine in (*host, "triton")
        for case in (few if INTERPRETED or engine in OLDER else cases)
    ]


#: Fixture of the C++ engines only. Other engines do not raise an error if a value is out of range.
cpu = _engines(*NATIVE)
#: Fixtures for tests of KV distances: all engines, and only the engines that read host memory.
of_distances = _engines(*HOST, ON_DEVICE)
host_of_distances = _engines(*HOST)


def use(engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make backend "native" load a C++ engine's library, or none for "torch". Return the engine's backend."""
    if engine == "torch":
        monkeypatch.setattr(native, "library", unavailable)
    elif engine in NATIVE:
        library = this_build() if engine == "native" else older_build(engine)
        if isinstance(library, str):
            pytest.skip(library)
        monkeypatch.setattr(native, "library", lambda: library)
    return "native" if engine in NATIVE else engine


def unavailable() -> ctypes.CDLL:
    raise native.NativeUnavailable("no compiler")


def this_build() -> ctypes.CDLL | str:
    """The library for this CPU, or the reason why there is none."""
    try:
        return _LIBRARY()
    except native.NativeUnavailable as error:
        return str(error)


_LIBRARY = native.library


@functools.cache
def older_build(level: str) -> ctypes.CDLL | str:
    """The library for a level of :data:`OLDER`, or the reason why there is none."""
    if platform.machine() != "x86_64":
        return "a build for an x86 CPU"
    if not set(Path("/proc/cpuinfo").read_text().split()) >= OLDER[level]:
        return f"this CPU is older than {level}"
    # ``_build`` caches this library on disk, so other processes and later runs do not compile it again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_OPTIMISED", ("-O1", f"-march={level}"))
        try:
            return ctypes.CDLL(str(native._build(native._source_root())))
        except native.NativeUnavailable as error:
            return str(error)
