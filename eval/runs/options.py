# SPDX-License-Identifier: Apache-2.0
"""What an operator can ask of a run: command line and TOML file, with defaults and bounds."""

import argparse
import shlex
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from eval.runs.folder import RunError

EMBEDDED = "tiny_reasoner"  # --model of the embedded checkpoint
#: Sampling parameters that can be set by hand, by the names of the request's body.
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


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
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers, got {text!r}") from None


def _pair(text: str, mark: str = "=", form: str = "NAME=VALUE") -> tuple[str, str]:
    key, _, value = text.partition(mark)
    if not key or not value:
        raise argparse.ArgumentTypeError(f"must be {form}, got {text!r}")
    return key, value


def _url(text: str) -> tuple[str, str]:
    # A method's name may hold an equals sign: the address begins at its scheme.
    key, value = _pair(text, "=http", "METHOD=http://...")
    return key, "http" + value


def _option(
    default: Any,
    read: Callable[[str], Any],
    metavar: str,
    text: str = "",
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field that is a flag; ``least`` without ``most`` bounds integers."""
    argument: dict[str, Any] = {"type": read, "metavar": metavar}
    if read is bool:
        argument = {"action": "store_true"}
    elif read in (_pair, _url):
        argument["action"] = "append"
    argument["help"] = text
    return field(default=default, metadata={"argument": argument, "bounds": (least, most)})


@dataclass(frozen=True)
class RunOptions:
    """A run as asked for, part of ``config.json``: must match on resuming. None: all problems, all
    requests at once, SGLang's or the model family's own. Raises RunError: names flag, bound, value."""

    model: str = _option(EMBEDDED, str, "M", f"Folder or hub name (default {EMBEDDED}, embedded).")
    tasks: tuple[str, ...] = _option((), _names, "a,b", "Names.")
    methods: tuple[str, ...] = _option(
        ("dense", "newest"), _specs, "x,y", "Names with options (default dense,newest)."
    )
    seeds: tuple[int, ...] = _option((0,), _integers, "0,1", "Numbers (default 0).")
    limit: int | None = _option(None, int, "N", "The first N problems of each task.", 1)
    in_flight: int | None = _option(None, int, "N", "Open requests (default: all at once).", 1)
    data: Mapping[str, str] = _option((), _pair, "TASK=FILE", "Local JSONL of a task.")
    server_flags: tuple[str, ...] = _option((), shlex.split, "FLAGS", "More of each server.")
    device: str = _option("auto", str, "D", "auto, cpu or cuda (default auto).")
    kv_budget: int | None = _option(None, int, "SLOTS", "KV slots of each server.", 1)
    max_tokens: int | None = _option(None, int, "N", "Longest response.", 1)
    temperature: float | None = _option(None, float, "X", "Not the model family's own.", 0, 100)
    top_p: float | None = _option(None, float, "X", "", 0, 1)
    top_k: int | None = _option(None, int, "N", "", -1, 1_000_000)
    min_p: float | None = _option(None, float, "X", "", 0, 1)
    allow_code_execution: bool = _option(False, bool, "", "Let graders run a model's code.")
    urls: Mapping[str, str] = _option((), _url, "METHOD=URL", "Its server.")
    attempts: int = _option(2, int, "N", "Times a failing request is sent (default 2).", 1)
    warm_up: int = _option(8, int, "N", "Requests before each cell (default 8).", 0)
    decode_log_interval: int = _option(10, int, "K", "Decode steps a log line (10).", 1)
    request_timeout: float = _option(21_600.0, float, "S", "Longest silence (21600).", 1e-9, 1e9)
    keep_servers: int = _option(1, int, "N", "Servers up at once (default 1).", 1)

    def __post_init__(self) -> None:
        for name in ("tasks", "methods", "seeds", "server_flags"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        paths = {task: str(Path(path).resolve()) for task, path in dict(self.data).items()}
        object.__setattr__(self, "data", paths)
        object.__setattr__(self, "urls", dict(self.urls))
        _check(self)

    @property
    def embedded(self) -> bool:
        return self.model == EMBEDDED

    @property
    def sampling_overrides(self) -> dict[str, float]:
        given = {name: getattr(self, name) for name in SAMPLING}
        return {name: value for name, value in given.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class Command:
    """What ``python -m eval.run`` is to do; ``allow_code_execution`` is that of ``grade``."""

    options: RunOptions | None  # None with resume or grade, whose folder has them
    out: Path | None = None  # None for a folder named after the options
    resume: Path | None = None
    grade: Path | None = None
    allow_code_execution: bool = False


def parse(argv: Sequence[str] | None = None) -> Command:
    """Read the command line, and the file of ``--config`` below it; exits with status 2."""
    parser = _parser()
    words = with_values(sys.argv[1:] if argv is None else argv, ("--server-flags",))
    given = vars(parser.parse_args(words))
    file = given.pop("config", None)
    for name in ("resume", "grade"):
        if name in given:
            others = set(given) - {name, *(["allow_code_execution"] if name == "grade" else [])}
            if others or file:
                other = sorted(others)[0] if others else "config"
                parser.error(f"--{name} goes without {_flag(other)}: the folder has it all")
            return Command(None, **given)
    try:
        if file:
            below = parser.parse_args(with_values(_words(file), ("--server-flags",)))
            given = {**vars(below), **given}
        out = given.pop("out", None)
        given |= {name: dict(given[name]) for name in ("data", "urls") if name in given}
        return Command(RunOptions(**given), out)
    except (RunError, OSError) as error:
        parser.error(str(error))


def with_values(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """Joins each of ``flags`` to the word after it, the flags of a server: left apart, argparse
    would take ``--tp=2`` for a flag of its own."""
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
    for one in fields(RunOptions):
        add(_flag(one.name), dest=one.name, **one.metadata["argument"])
    for flag, metavar, text in (
        ("--out", "RUN", "Folder of the run (default out/ and a name of the options)."),
        ("--config", "FILE.toml", "The same names; flags win."),
        ("--resume", "RUN", "Go on with a run; takes no other flag."),
        ("--grade", "RUN", "Grade the responses of a run again."),
    ):
        add(flag, type=Path, metavar=metavar, help=text)
    return parser


def _words(path: Path) -> list[str]:
    """A TOML file as a command line. Raises RunError: it cannot be read, or has an unknown name."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"--config {path}: {error}") from error
    known = {f.name for f in fields(RunOptions)} - {"urls"} | {"out", "url"}
    words: list[str] = []
    for key, value in values.items():
        if key.replace("-", "_") not in known:
            raise RunError(f"--config {path}: unknown name {key!r}")
        flag = _flag(key)
        if isinstance(value, bool):
            words += [flag] if value else []
        elif isinstance(value, dict):
            words += [f"{flag}={name}={text}" for name, text in value.items()]
        elif isinstance(value, list):
            join = shlex.join if flag == "--server-flags" else ",".join
            words.append(f"{flag}={join([str(part) for part in value])}")
        else:
            words.append(f"{flag}={value}")
    return words


def _check(options: RunOptions) -> None:
    for one in fields(RunOptions):
        value, (low, high) = getattr(options, one.name), one.metadata["bounds"]
        if value is None or low is None:
            continue
        if high is None and (type(value) is not int or value < low):
            raise RunError(f"{_flag(one.name)} must be an integer of at least {low}, got {value!r}")
        if high is not None and not low <= value <= high:
            raise RunError(f"{_flag(one.name)} must be between {low} and {high}, got {value!r}")
    if options.device not in ("auto", "cpu", "cuda"):
        raise RunError(f"--device must be auto, cpu or cuda, got {options.device!r}")
    for name in ("tasks", "methods", "seeds"):
        chosen = getattr(options, name)
        if not chosen or len(set(chosen)) < len(chosen):
            raise RunError(f"{_flag(name)} must name at least one, none twice, got {list(chosen)}")
    for name, of in (("data", "tasks"), ("urls", "methods")):
        for key in getattr(options, name):
            if key not in getattr(options, of):
                raise RunError(f"{_flag(name)} {key}=...: {key!r} is not among {_flag(of)}")
    for method, url in options.urls.items():
        if not url.startswith(("http://", "https://")):
            raise RunError(f"--url {method}={url}: must begin with http:// or https://")


def _flag(name: str) -> str:
    """``in_flight`` -> ``--in-flight``."""
    return "--url" if name == "urls" else "--" + name.replace("_", "-")
