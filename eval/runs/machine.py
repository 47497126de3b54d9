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
_PACKAGES = ("sglang", "torch", "transformers", "openai", "lm_eval", "sglang-reasoncache")


def describe_machine() -> dict[str, Any]:
    """CPU model, cores, RAM in bytes, names and memory of the GPUs."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # Not through torch: that would take some of the GPU's memory in this process.
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": gpus.splitlines(),
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str | None]:
    """Versions of what computes the result, None for what is not installed, and our git commit,
    with ``+`` where files differ from it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    git = ("git", "-C", str(_ROOT))
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    commit = _output(*git, "rev-parse", "HEAD") + ("+" if changed else "")
    return {**found, "commit": commit or None}


def _output(*command: str) -> str:
    """What a command prints, "" if it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
