# SPDX-License-Identifier: Apache-2.0
"""``config.json`` of a run: everything asked for, and what it ran on."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.methods import Method
from eval.runs.folder import CONFIG, RunError, read_config, write_config
from eval.runs.machine import describe_machine, describe_versions
from eval.runs.options import RunOptions, to_config
from eval.tasks.task import Problem

#: What may differ when a run goes on; all else decides what is measured.
_MAY_DIFFER = frozenset(
    (
        "machine",
        "versions",
        "date",
        "command_line",
        "resumed",
        "random_ratios",
        # Folders of older versions lack it; it follows from the model.
        "opens_thinking",
    )
)


def make_config(
    options: RunOptions,
    methods: Sequence[Method],
    problems: Mapping[tuple[str, int], Sequence[Problem]],
    body: Mapping[str, Any],
    opens_thinking: bool,
) -> dict[str, Any]:
    """The configuration of a new run; plain JSON values.

    Args:
        options: ``device`` resolved.
        methods: of ``options.methods``, in their order.
        problems: of each task and seed.
        body: the sampling part of each request.
        opens_thinking: whether the chat template begins responses with ``<think>``.
    """
    return {
        **to_config(options),
        "methods": [method.name for method in methods],
        "method_specs": list(options.methods),
        "method_details": {
            method.name: {
                "title": method.title,
                "flags": list(method.flags),
                "match": method.match,
                "url": options.urls.get(spec),
            }
            for method, spec in zip(methods, options.methods, strict=True)
        },
        "sampling": dict(body),
        "opens_thinking": opens_thinking,
        "data": {
            task: {"path": path, "sha256": file_digest(Path(path))}
            for task, path in options.data.items()
        },
        "problems": {
            task: {
                str(seed): {
                    "count": len(problems[task, seed]),
                    "sha256": problems_digest(problems[task, seed]),
                }
                for seed in options.seeds
            }
            for task in options.tasks
        },
        "random_ratios": {},
        **_circumstances(),
        "resumed": [],
    }


def settle_config(run: Path, config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Write the configuration of a new run, or hold it against the one that is there.

    Returns:
        The folder's configuration, and what has changed on the machine since, for a warning.

    Raises:
        RunError: the folder is another run's; names the first field that differs.
    """
    if not (run / CONFIG).exists():
        write_config(run, config)
        return config, []
    there = read_config(run)
    check_same(run, there, config)
    now = _circumstances()
    last = there["resumed"][-1] if there.get("resumed") else there
    changed = [
        f"{group}.{name} was {last[group].get(name)!r}, is {value!r}"
        for group in ("machine", "versions")
        for name, value in now[group].items()
        if last.get(group, {}).get(name) != value
    ]
    there.setdefault("resumed", []).append(now)
    there.setdefault("opens_thinking", config["opens_thinking"])
    write_config(run, there)
    return there, changed


def check_same(run: Path, there: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises RunError naming the first field in which two configurations differ."""
    wanted = json.loads(json.dumps(config))
    for name in dict.fromkeys((*wanted, *there)):
        if name not in _MAY_DIFFER and there.get(name) != wanted.get(name):
            raise RunError(
                f"{run / CONFIG}: {name} is {_short(there.get(name))} in this run, "
                f"now {_short(wanted.get(name))}; use the same or another --out"
            )


def default_folder(config: Mapping[str, Any]) -> Path:
    """A folder named after the configuration: the same command finds the same one."""
    kept = {name: value for name, value in config.items() if name not in _MAY_DIFFER}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", str(config["model"]).rstrip("/").rpartition("/")[2])
    return Path("out") / f"{model}-{'+'.join(config['tasks'])[:80]}-{digest}"


def problems_digest(problems: Sequence[Problem]) -> str:
    """SHA-256 of what is sent and graded."""
    rows = [[p.id, p.prompt, p.reference, p.group, dict(p.extra), p.max_tokens] for p in problems]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes.

    Raises:
        RunError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"--data: {path}: {error.strerror or error}") from error


def _circumstances() -> dict[str, Any]:
    return {
        "machine": describe_machine(),
        "versions": describe_versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command_line": shlex.join(["python", *sys.orig_argv[1:]]),
    }


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "..."
