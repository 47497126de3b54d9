# SPDX-License-Identifier: Apache-2.0
"""What a run was measured on and with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("sglang", "torch", "transformers", "openai", "sglang-reasoncache")


def describe_machine() -> dict[str, Any]:
    """CPU model, cores, RAM in bytes, names and memory of the GPUs."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str | None]:
    """Versions of what computes the result; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return {**found, "commit": _commit()}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    # Not through torch: that would take some of the GPU's memory in this process.
    out = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return [line.strip() for line in (out or "").splitlines() if line.strip()]


def _commit() -> str | None:
    """The project's git commit, with ``+`` where files differ from it; None outside of git."""
    commit = _output("git", "-C", str(_ROOT), "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _output("git", "-C", str(_ROOT), "status", "--porcelain", "--untracked-files=no")
    return commit.strip() + ("+" if changed else "")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
