# SPDX-License-Identifier: Apache-2.0
"""The command line of ``python -m eval.run``, and the TOML file below it."""

from __future__ import annotations

import argparse
import shlex
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eval.runs.folder import RunError
from eval.runs.options import EMBEDDED, SAMPLING, RunOptions, make_options, option_flag


@dataclass(frozen=True)
class Command:
    """What ``python -m eval.run`` is to do.

    Attributes:
        options: None with ``resume`` or ``grade``, whose folder has them.
        out: the folder, None for one named after the options.
        resume: go on with this folder.
        grade: grade this folder again.
        allow_code_execution: of ``grade``.
    """

    options: RunOptions | None
    out: Path | None = None
    resume: Path | None = None
    grade: Path | None = None
    allow_code_execution: bool = False


def parse(argv: Sequence[str] | None = None) -> Command:
    """Read the command line, and the file of ``--config`` below it.

    Exits with status 2 and a message that names flag (or file), bound and value.
    """
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    given = vars(parser.parse_args(with_values(words, ("--server-flags",))))
    file = given.pop("config", None)
    alone = [name for name in ("resume", "grade") if name in given]
    if alone:
        allowed = {alone[0], *(("allow_code_execution",) if alone == ["grade"] else ())}
        others = sorted(set(given) - allowed) + (["config"] if file else [])
        if others:
            parser.error(
                f"--{alone[0]} goes without {option_flag(others[0])}: the folder has it all"
            )
        return Command(
            None,
            resume=given.get("resume"),
            grade=given.get("grade"),
            allow_code_execution=given.get("allow_code_execution", False),
        )
    try:
        values = {**(_from_file(file) if file else {}), **given}
        out = values.pop("out", None)
        return Command(make_options(values), None if out is None else Path(out))
    except (RunError, OSError) as error:
        parser.error(str(error))


def with_values(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """A command line in which each of ``flags`` is joined to the word after it.

    Their values are flags of a server: left apart, argparse would take ``--tp=2`` for a flag
    of its own.
    """
    joined: list[str] = []
    for word in argv:
        if joined and joined[-1] in flags:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval.run",
        description="Tasks x methods x seeds against live servers; docs/evaluation.md has it all.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help=f"Folder or hub name (default {EMBEDDED}, the embedded model).")
    add("--tasks", type=_names, help="Comma-separated names.")
    add("--methods", type=_specs, help="Comma-separated (default dense,reasoncache).")
    add("--seeds", type=_integers, help="Comma-separated numbers (default 0).")
    add("--out", type=Path, help="Folder of the run (default out/ and a name made of the options).")
    add("--config", type=Path, metavar="FILE.toml", help="The same names; flags win.")
    add("--limit", type=int, metavar="N", help="The first N problems of each task.")
    add("--in-flight", type=int, metavar="N", help="Open requests (default: all at once).")
    add("--data", type=_pair, action="append", metavar="TASK=FILE", help="Local JSONL of a task.")
    add("--server-flags", type=shlex.split, metavar="FLAGS", help="Further flags of each server.")
    add("--device", help="auto, cpu or cuda (default auto).")
    add("--kv-budget", type=int, metavar="SLOTS", help="KV slots of each server.")
    add("--max-tokens", type=int, metavar="N", help="Longest response.")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        add(option_flag(name), type=kind, help="Instead of the model family's own setting.")
    add("--allow-code-execution", action="store_true", help="Let graders run a model's code.")
    add("--url", dest="urls", type=_url, action="append", metavar="METHOD=URL", help="Its server.")
    add("--attempts", type=int, metavar="N", help="Times a failing request is sent (default 2).")
    add("--warm-up", type=int, metavar="N", help="Requests before each cell (default 8).")
    add("--decode-log-interval", type=int, metavar="K", help="Decode steps a log line (10).")
    add("--keep-servers", type=int, metavar="N", help="Servers up at once (default 1).")
    add("--request-timeout", type=float, metavar="S", help="Longest silence (default 21600).")
    add("--resume", type=Path, metavar="RUN", help="Go on with a run; takes no other flag.")
    add("--grade", type=Path, metavar="RUN", help="Grade the responses of a run again.")
    return parser


def _from_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"--config {path}: {error}") from error
    known = {f.name for f in fields(RunOptions)} | {"out", "url", *SAMPLING}
    known -= {"sampling_overrides", "urls"}
    out = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            raise RunError(f"--config {path}: unknown name {key!r}")
        try:
            out["urls" if name == "url" else name] = _plain(name, value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise RunError(f"--config {path}: {key}: {error}") from error
    return out


def _plain(name: str, value: Any) -> Any:
    """A value of the file as the command line would give it."""
    split: Mapping[str, Callable[[str], Sequence[Any]]] = {
        "tasks": _names,
        "methods": _specs,
        "seeds": _integers,
        "server_flags": shlex.split,
    }
    if name in split and isinstance(value, str):
        return split[name](value)
    return value


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _specs(text: str) -> list[str]:
    """Split at commas, but ``a:x=1,y=2,b`` is ``a:x=1,y=2`` and ``b``."""
    specs: list[str] = []
    for part in _names(text):
        if specs and ":" in specs[-1] and "=" in part and ":" not in part.partition("=")[0]:
            specs[-1] += "," + part
        else:
            specs.append(part)
    return specs


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in _names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}") from error


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not key or not value:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return key, value


def _url(text: str) -> tuple[str, str]:
    # A method's name may hold an equals sign: the address begins at its scheme.
    key, _, value = text.partition("=http")
    if not key or not value:
        raise argparse.ArgumentTypeError(f"must be METHOD=http://..., got {text!r}")
    return key, "http" + value
