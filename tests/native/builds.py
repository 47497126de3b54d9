# SPDX-License-Identifier: Apache-2.0
"""Kernels as older CPUs would run them."""

from __future__ import annotations

import ctypes
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_reasoncache import native

CSRC = Path(__file__).resolve().parents[2] / "csrc"
#: What a build for an older x86 lacks: AVX-512; then AVX, F16C and FMA too.
OLDER = {"x86-64-v3": {"avx2", "f16c", "fma"}, "x86-64": set[str]()}


def build_as_older(level: str, sources: Sequence[Path], folder: Path) -> ctypes.CDLL:
    """The library of some sources for a level of :data:`OLDER`; skips where that cannot be had."""
    if native.build.sanitized():
        pytest.skip("one build with the sanitizers is enough")
    if platform.machine() != "x86_64":
        pytest.skip("a build for an x86 CPU")
    if not set(Path("/proc/cpuinfo").read_text().split()) >= OLDER[level]:
        pytest.skip(f"this CPU is older than {level}")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    target = folder / f"{level}.so"
    options = f"-std=c++17 -O1 -march={level} -fPIC -shared -pthread -ffp-contract=off -I{CSRC}"
    subprocess.run(
        [compiler, *shlex.split(options), *map(str, sources), "-o", str(target)], check=True
    )
    return ctypes.CDLL(str(target))
