# SPDX-License-Identifier: Apache-2.0
"""The options of a run: flags with defaults and bounds."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval import command
from eval.command import flags_of, option
from eval.runs.folder import RunError

EMBEDDED = "tiny_reasoner"  # the value of --model for the model in eval/tiny_reasoner
#: Sampling parameters that have flags, by their names in a request's body.
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def specs(text: str) -> tuple[str, ...]:
    """Split only at the commas between methods: ``a:x=1,y=2,b`` gives ``a:x=1,y=2`` and ``b``."""
    methods: list[str] = []
    for part in text.split(","):
        if methods and ":" in methods[-1] and "=" in part and ":" not in part.partition("=")[0]:
            methods[-1] += "," + part.strip()
        else:
            methods.append(part.strip())
    return tuple(filter(None, methods))


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    if not key or not value:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return key, value


@dataclass(frozen=True)
class RunOptions:
    """The options of a run, a part of ``config.json``. None means no limit (``limit``, ``in_flight``) or a
    default of this project, SGLang or the model. Raises RunError, which names the flag, if a value is bad."""

    model: str = option(
        EMBEDDED, "folder or hub name of the model; the default is in this repository", metavar="M"
    )
    tasks: tuple[str, ...] = option(
        (), "tasks whose problems are sent (docs/evaluation.md)", metavar="a,b"
    )
    methods: tuple[str, ...] = option(
        ("dense", "newest"),
        "servers to compare: NAME or NAME:key=value,... (docs/evaluation.md)",
        read=specs,
        metavar="x,y",
    )
    seeds: tuple[int, ...] = option(
        (0,), "seeds; each makes one pass over the problems", metavar="0,1"
    )
    limit: int | None = option(None, "the first N problems of each task", least=1, metavar="N")
    in_flight: int | None = option(
        None, "most requests open at a time, by default all", least=1, metavar="N"
    )
    data: Mapping[str, str] = option(
        (),
        "JSONL file with the rows of a task, instead of the hub's",
        read=_pair,
        metavar="TASK=FILE",
    )
    server_flags: tuple[str, ...] = option(
        (), "further flags of servers; --server-flags=FLAG for one", read=flags_of, metavar="FLAGS"
    )
    device: str = option(
        "auto", "cpu, cuda, or auto: cuda if PyTorch sees a GPU", choices=("auto", "cpu", "cuda")
    )
    kv_budget: int | None = option(
        None, "KV slots of each server, in the model's data type", least=1, metavar="SLOTS"
    )
    max_tokens: int | None = option(None, "most tokens of a response", least=1, metavar="N")
    temperature: float | None = option(
        None, "of sampling, 0: greedy; by default the model's", least=0, most=100
    )
    top_p: float | None = option(
        None, "share of probability to sample from; by default the model's", least=0, most=1
    )
    top_k: int | None = option(
        None, "likeliest tokens to sample from, -1: all; by default the model's", least=-1
    )
    min_p: float | None = option(
        None,
        "least probability, as a share of the highest; by default the model's",
        least=0,
        most=1,
    )
    attempts: int = option(2, "times a failing request is sent", least=1, metavar="N")
    warm_up: int = option(
        8, "requests before each cell, which are not measured", least=0, metavar="N"
    )
    decode_log_interval: int = option(
        10, "decode steps for each line of the server's log", least=1, metavar="K"
    )
    request_timeout: float = option(
        21_600.0,
        "seconds of silence after which a request fails",
        least=1e-9,
        most=1e9,
        metavar="S",
    )
    keep_servers: int = option(1, "most servers up at a time", least=1, metavar="N")
    prefill_flags: tuple[str, ...] | None = option(
        None,
        "flags of a prefill server; the servers then decode only, behind SGLang's router",
        read=flags_of,
        metavar="FLAGS",
    )

    def __post_init__(self) -> None:
        for name in ("tasks", "methods", "seeds", "server_flags"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        paths = {task: str(Path(path).resolve()) for task, path in dict(self.data).items()}
        object.__setattr__(self, "data", paths)
        for name in ("tasks", "methods", "seeds"):
            chosen = getattr(self, name)
            if not chosen or len(set(chosen)) < len(chosen):
                raise RunError(f"--{name} must name one or more, none twice, got {list(chosen)}")
        for task in self.data:
            if task not in self.tasks:
                raise RunError(f"--data {task}=...: {task!r} is not among --tasks")

    @property
    def embedded(self) -> bool:
        return self.model == EMBEDDED

    @property
    def sampling_overrides(self) -> dict[str, float]:
        values = {name: getattr(self, name) for name in SAMPLING}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class _Folder:
    out: Path | None = option(None, "folder of the run, by default out/ and a name of the options")


def parse(argv: Sequence[str] | None = None) -> tuple[RunOptions, Path | None]:
    """Returns the options of ``python -m eval.run``, and ``--out``. ``@FILE`` inserts the words of a file. If a
    flag other than ``--data`` is repeated, the last counts. Exits with status 2 for a bad command line."""
    parser = command.parser_of(RunOptions, _Folder, prog="python -m eval.run")
    words: list[str] = []
    try:
        for word in sys.argv[1:] if argv is None else argv:
            is_file = word.startswith("@")
            words += shlex.split(Path(word[1:]).read_text(), comments=True) if is_file else [word]
        values = vars(parser.parse_args(words))
        out = values.pop("out")
        return RunOptions(**values), out
    except (OSError, ValueError) as error:
        parser.error(str(error))
