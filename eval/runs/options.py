# SPDX-License-Identifier: Apache-2.0
"""What an operator can ask of a run, with defaults and bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eval.runs.folder import RunError

#: ``--model`` of the embedded checkpoint.
EMBEDDED = "tiny_reasoner"
# Least value of each integer.
_LEAST = {
    "limit": 1,
    "in_flight": 1,
    "kv_budget": 1,
    "max_tokens": 1,
    "attempts": 1,
    "warm_up": 0,
    "decode_log_interval": 1,
    "keep_servers": 1,
}
#: Sampling parameters that can be set by hand, with their bounds.
SAMPLING = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 1_000_000),
    "min_p": (0, 1),
}


@dataclass(frozen=True)
class RunOptions:
    """A run as asked for; every field is part of ``config.json`` and must match on resuming.

    Attributes:
        model: folder or hub name, or ``tiny_reasoner``.
        tasks: names of tasks.
        methods: specifications as of :func:`eval.methods.find_method`.
        seeds: one pass over the problems each.
        limit: the first so many problems of each task, None for all.
        in_flight: requests open at a time, None for all at once.
        data: local JSONL of a task, absolute.
        server_flags: further flags of every server.
        device: ``cpu`` or ``cuda``.
        kv_budget: KV slots of every server, None for the default.
        max_tokens: of each response, None for the sampling setting's own.
        sampling_overrides: what was set by hand, by the names of the request's body.
        allow_code_execution: whether graders may run code that a model wrote.
        urls: running servers by method; that method starts none.
        attempts: how often a request is sent before it counts as failed.
        warm_up: requests sent before each measured cell.
        decode_log_interval: decode steps between two lines of the server's log.
        request_timeout: seconds without a byte after which a request has failed.
        keep_servers: servers that stay up at once and take turns.
    """

    model: str = EMBEDDED
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("dense", "reasoncache")
    seeds: tuple[int, ...] = (0,)
    limit: int | None = None
    in_flight: int | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    server_flags: tuple[str, ...] = ()
    device: str = "auto"
    kv_budget: int | None = None
    max_tokens: int | None = None
    sampling_overrides: Mapping[str, float] = field(default_factory=dict)
    allow_code_execution: bool = False
    urls: Mapping[str, str] = field(default_factory=dict)
    attempts: int = 2
    warm_up: int = 8
    decode_log_interval: int = 10
    request_timeout: float = 21_600.0
    keep_servers: int = 1

    @property
    def embedded(self) -> bool:
        return self.model == EMBEDDED


def from_config(config: Mapping[str, Any]) -> RunOptions:
    """The options that a run folder's configuration was made of.

    Raises:
        RunError: a field is missing or has a bad value.
    """
    values = {}
    for name in (f.name for f in fields(RunOptions)):
        # config.json has methods by name; a name is a specification fit for a folder.
        key = "method_specs" if name == "methods" else name
        if key not in config:
            raise RunError(f"config.json: {key!r} is missing")
        values[name] = config[key]
    values["data"] = {task: entry["path"] for task, entry in values["data"].items()}
    return make_options(values)


def to_config(options: RunOptions) -> dict[str, Any]:
    """Plain JSON values; ``data`` is left to the caller, who reads the files."""
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def make_options(values: Mapping[str, Any]) -> RunOptions:
    """Check values of whatever origin and make the record.

    Raises:
        RunError: names flag, bound and value.
    """
    values = dict(values)
    sampling = dict(values.pop("sampling_overrides", {}))
    sampling |= {name: values.pop(name) for name in SAMPLING if name in values}
    for name in ("data", "urls"):
        table = values.get(name, {})
        if not isinstance(table, (Mapping, list)):
            raise RunError(
                f"{option_flag(name)} must be a table of names and values, got {table!r}"
            )
        table = table if isinstance(table, Mapping) else dict(table)
        values[name] = {str(key): str(text) for key, text in table.items()}
    values["data"] = {task: str(Path(path).resolve()) for task, path in values["data"].items()}
    for name, kind in (("tasks", str), ("methods", str), ("seeds", int), ("server_flags", str)):
        values[name] = _tuple(name, values.get(name, getattr(RunOptions, name)), kind)
    for name, least in _LEAST.items():
        value = values.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise RunError(
                f"{option_flag(name)} must be an integer of at least {least}, got {value!r}"
            )
    for name, value in sampling.items():
        low, high = SAMPLING[name]
        if type(value) not in (int, float) or not low <= value <= high:
            raise RunError(f"{option_flag(name)} must be between {low} and {high}, got {value!r}")
    options = RunOptions(**values, sampling_overrides=sampling)
    _check(options)
    return options


def _check(options: RunOptions) -> None:
    timeout = options.request_timeout
    if type(timeout) not in (int, float) or not 0 < timeout < math.inf:
        raise RunError(f"--request-timeout must be above 0, got {timeout!r}")
    if options.device not in ("auto", "cpu", "cuda"):
        raise RunError(f"--device must be auto, cpu or cuda, got {options.device!r}")
    if type(options.model) is not str or not options.model:
        raise RunError(f"--model must name a model, got {options.model!r}")
    if type(options.allow_code_execution) is not bool:
        raise RunError("--allow-code-execution must be true or false")
    for name in ("tasks", "methods", "seeds"):
        chosen = getattr(options, name)
        if not chosen:
            raise RunError(f"{option_flag(name)} must name at least one")
        if len(set(chosen)) < len(chosen):
            raise RunError(f"{option_flag(name)} names one twice: {','.join(map(str, chosen))}")
    for name, known in (("data", options.tasks), ("urls", options.methods)):
        for key in getattr(options, name):
            if key not in known:
                flag, of = ("--data", "--tasks") if name == "data" else ("--url", "--methods")
                raise RunError(f"{flag} {key}=...: {key!r} is not among {of}")
    for method, url in options.urls.items():
        if not url.startswith(("http://", "https://")):
            raise RunError(f"--url {method}={url}: must begin with http:// or https://")


def option_flag(name: str) -> str:
    """``in_flight`` -> ``--in-flight``."""
    return "--url" if name == "urls" else "--" + name.replace("_", "-")


def _tuple(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise RunError(f"{option_flag(name)} must be a list, got {values!r}")
    for value in values:
        if type(value) is not kind:
            raise RunError(f"{option_flag(name)} must list {kind.__name__} values, got {value!r}")
    return tuple(values)
