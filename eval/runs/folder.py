# SPDX-License-Identifier: Apache-2.0
"""A run's folder, as docs/evaluation.md lists it: configuration first, then what each cell left.

A process may be killed at any byte: a last line without its end is cut off when it goes on."""

import contextlib
import fcntl
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar


@dataclass(frozen=True)
class Response:
    """One answered (or failed) request."""

    problem_id: str
    leg: int  # server session of the cell; a resumed run adds legs
    request_id: str
    text: str  # all that was streamed; reasoning that a server sends apart first, in <think> tags
    prompt_tokens: int  # counted by the server, as output_tokens
    output_tokens: int
    started: float
    first_token: float | None  # when the first text arrived
    ended: float
    finish_reason: str = ""  # as the server gave it
    error: str | None = None  # what went wrong, None for a complete response


@dataclass(frozen=True)
class Result:
    """One graded response; ``group`` is the problem's."""

    problem_id: str
    correct: bool
    score: float
    extracted: str | None
    note: str
    group: str
    output_tokens: int


@dataclass(frozen=True)
class Moment:
    """The server during a decode step, as its own log tells."""

    leg: int
    step: int  # number of the logged line within the leg
    running: int  # requests in the batch
    queued: int  # requests that wait
    used: int  # KV slots in use
    saved: int  # KV slots that sharing and eviction made unnecessary
    tokens_per_s: float  # generation throughput by the server's own clock


@dataclass(frozen=True)
class Leg:
    """One server session of a cell."""

    leg: int
    seconds: float  # from the first request sent to the last response ended
    output_tokens: int  # of complete responses
    responses: int  # complete ones
    decode_steps: int  # decode forwards, from the log's lines times their interval
    retractions: int  # requests that were thrown out of a batch and recomputed
    report: dict[str, Any]  # the scheduler's entry of GET /reasoncache, {} for a stock server
    leaked_slots: int | None  # slots in use after the last response and a flush
    command: list[str]  # the server's command line, [] for one that was only given as URL
    # Whether its last request ended with the server alive; one that was stopped has requests whose
    # time counts and whose tokens are lost.
    ended: bool = True
    kv_slots: int | None = None  # those that the server really has, of one data-parallel scheduler
    # Prompts longer than the model's context or the KV slots, which the server cut; None for a
    # given server, whose log is out of reach.
    cut_prompts: int | None = None


_R = TypeVar("_R", Response, Result, Moment, Leg)
CONFIG = "config.json"


class RunError(ValueError):
    """A run folder cannot be used; the message names the file and the fault."""


@dataclass(frozen=True)
class Cell:
    """One task, method and seed of a run."""

    run: Path
    task: str
    method: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.run / self.task / self.method / f"seed-{self.seed}"

    def log_path(self, leg: int) -> Path:
        return self.folder / f"server-{leg}.log"

    def responses(self) -> list[Response]:
        """All lines, failed requests and repeats included, in the order they ended."""
        return read_records(self.folder / "responses.jsonl", Response)

    def answered(self) -> dict[str, Response]:
        """Complete responses by problem."""
        return {row.problem_id: row for row in self.responses() if row.error is None}

    def results(self) -> list[Result]:
        return read_records(self.folder / "results.jsonl", Result)

    def timeline(self) -> list[Moment]:
        return read_records(self.folder / "timeline.jsonl", Moment)

    def legs(self) -> list[Leg]:
        return read_records(self.folder / "legs.jsonl", Leg)

    def append(self, *records: Response | Moment | Leg) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for record in records:
            name = {Response: "responses", Moment: "timeline", Leg: "legs"}[type(record)]
            with (self.folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
                # ASCII, so that lone surrogates in a response survive.
                file.write(json.dumps(asdict(record)) + "\n")

    def write_results(self, results: Iterable[Result]) -> None:
        """Replace the grades; grading again loses nothing."""
        lines = "".join(json.dumps(asdict(result)) + "\n" for result in results)
        write_whole(self.folder / "results.jsonl", lines)

    def mend(self) -> None:
        """Cut unfinished last lines off, before anything is appended to them."""
        for name in ("responses", "timeline", "legs"):
            cut_unfinished(self.folder / f"{name}.jsonl")


def cells(run: Path) -> list[Cell]:
    """A run's cells that have been begun, in its order. Raises RunError: not a run folder."""
    config = read_config(run)
    each = itertools.product(*(config[name] for name in ("tasks", "methods", "seeds")))
    return [cell for one in each if (cell := Cell(run, *one)).folder.is_dir()]


def read_config(run: Path) -> dict[str, Any]:
    """``config.json``, with lists of tasks, methods and seeds. Raises RunError: missing or broken."""
    path = run / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}") from error
    for key in ("tasks", "methods", "seeds"):
        if not isinstance(config, dict) or not isinstance(config.get(key), list):
            raise RunError(f"{path}: {key!r} must be a list")
    return dict(config)


def write_config(run: Path, config: dict[str, Any]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    write_whole(run / CONFIG, json.dumps(config, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write all of a file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def cut_unfinished(path: Path) -> None:
    """Cut a last line without its end off a file, if there is one."""
    if path.is_file():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def read_records(path: Path, kind: type[_R]) -> list[_R]:
    """Lines of a file, if there is one, but an unfinished last. Raises RunError: a bad line."""
    if not path.is_file():
        return []
    rows, known = [], {one.name for one in fields(kind)}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                # Fields that a later version added are passed over.
                given = json.loads(line).items()
                rows.append(kind(**{name: value for name, value in given if name in known}))
            except (ValueError, TypeError, AttributeError) as error:
                raise RunError(f"{path}:{number}: {error}") from error
    return rows


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold a run's folder, made if need be, until the process ends. Raises RunError: another does."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise RunError(f"{run / 'lock'}: process {holder} works in this folder") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
