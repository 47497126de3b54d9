# SPDX-License-Identifier: Apache-2.0
"""Makes and checks a run's ``config.json``: options, problems, machine and package versions."""

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from eval.methods import Method
from eval.runs.folder import CONFIG, RunError, read_config, write_json

if TYPE_CHECKING:
    # Imported only for type checks, because eval.runs.plan loads lm-eval, which takes seconds.
    from eval.runs.plan import Plan

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("sglang", "torch", "transformers", "openai", "lm_eval", "sglang-reasoncache")
#: Fields that may differ when a run continues; all others decide what is measured.
_MAY_DIFFER = ("machine", "versions", "date", "command_line")


def make_config(plan: "Plan", methods: Sequence[Method], opens_thinking: bool) -> dict[str, Any]:
    """The content of a run's ``config.json``. ``methods`` are the methods that ``plan.options`` names."""
    options = plan.options
    details = {
        method.name: [*method.flags, *map("=".join, method.env.items())] for method in methods
    }
    data = {
        task: {"path": path, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
        for task, path in options.data.items()
    }
    problems = {
        f"{name}/{seed}": {"count": len(task.problems), "sha256": _digest(task.problems)}
        for (name, seed), task in plan.tasks.items()
    }
    inputs: dict[str, Any] = {"method_flags": details, "sampling": dict(plan.body), "data": data}
    inputs |= {"opens_thinking": opens_thinking, "problems": problems}
    return {**dataclasses.asdict(options), **inputs, **_circumstances()}


def settle_config(run: Path, config: dict[str, Any]) -> None:
    """Write ``config`` into the folder of a new run. For an old run, compare ``config`` with the old
    ``config.json``. Raises RunError, naming the first field that differs and is not in ``_MAY_DIFFER``."""
    if not (run / CONFIG).exists():
        write_json(run / CONFIG, config)
        return
    there = read_config(run)
    wanted = json.loads(json.dumps(config))
    for name in dict.fromkeys((*wanted, *there)):
        if name not in _MAY_DIFFER and there.get(name) != wanted.get(name):
            was, now = (json.dumps(fields.get(name))[:200] for fields in (there, wanted))
            fault = f"{name} is {was} in this run, now {now}; use the same or another --out"
            raise RunError(f"{run / CONFIG}: {fault}")


def default_folder(config: Mapping[str, Any]) -> Path:
    """A folder named after the configuration, so that the same command finds the same folder."""
    kept = {name: value for name, value in config.items() if name not in _MAY_DIFFER}
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", str(config["model"]).rstrip("/").rpartition("/")[2])
    return Path("out") / f"{model}-{'+'.join(config['tasks'])[:80]}-{digest_of(kept)}"


def digest_of(content: Any) -> str:
    """The first eight hexadecimal digits of the SHA-256 hash of ``content``, written as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def _digest(problems: Sequence[Any]) -> str:
    rows = [[p.id, p.messages, dict(p.body), p.max_tokens] for p in problems]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def _circumstances() -> dict[str, Any]:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    words = shlex.join(["python", *sys.orig_argv[1:]])
    machine = describe_machine()
    versions = describe_versions()
    return {"machine": machine, "versions": versions, "date": date, "command_line": words}


def describe_machine() -> dict[str, Any]:
    """CPU model, usable cores, RAM in bytes, names and memory of the GPUs, and operating system."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # nvidia-smi lists the GPUs, because torch would take some GPU memory for this process.
    gpus = _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "gpus": gpus.splitlines(),
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str | None]:
    """Versions of Python and of ``_PACKAGES`` (None if not installed), and the git commit of this checkout,
    followed by ``+`` if tracked files differ from the commit."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        **dict.fromkeys(_PACKAGES),
    }
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    git = ("git", "-C", str(_ROOT))
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    commit = _output(*git, "rev-parse", "HEAD") + ("+" if changed else "")
    return {**versions, "commit": commit or None}


def _output(*command: str) -> str:
    """What a command prints; "" if it cannot run or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, timeout=20
        ).strip()
    return ""
