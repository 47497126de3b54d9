# SPDX-License-Identifier: Apache-2.0
"""Reads and writes a run's folder (see docs/evaluation.md). A cell is one task, method and seed of a run."""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import FileLock, Timeout


@dataclass(frozen=True)
class Response:
    """A response, or a failed attempt to get a response. Times are seconds since the cell's first request."""

    problem_id: str
    request_id: str
    text: str  # all that was streamed; reasoning from a separate field comes first, in <think> tags
    prompt_tokens: int  # counted by the server, like output_tokens
    output_tokens: int
    started: float
    first_token: float | None  # when the first text arrived
    ended: float
    finish_reason: str = ""  # as the server gave it
    error: str | None = None  # what went wrong, None for a complete response


@dataclass(frozen=True)
class Result:
    """The grade of a response. ``group`` is copied from the :class:`Problem`."""

    problem_id: str
    correct: bool
    score: float
    extracted: str | None
    note: str
    group: str
    output_tokens: int


@dataclass(frozen=True)
class Moment:
    """The state of a scheduler during a decode step, from a line of the server's log."""

    step: int  # index of the line among the cell's logged decode lines
    running: int  # requests in the batch
    queued: int  # requests that wait
    used: int  # KV slots in use
    saved: int  # KV slots that sharing and eviction made unnecessary
    tokens_per_s: float  # generation throughput by the server's own clock


@dataclass(frozen=True)
class Served:
    """What a cell's server did, from the first request sent to the end of the last response."""

    seconds: float
    output_tokens: int  # of complete responses
    responses: int  # complete responses
    decode_steps: int  # forward passes: logged decode lines times --decode-log-interval
    retractions: int  # how often SGLang retracted a request, to compute it again later
    reports: list[dict[str, Any]]  # parts of GET /reasoncache/details; [] for a stock server
    leaked_slots: int  # KV slots still in use after the last response and a cache flush
    command: list[str]  # the server's command line
    kv_slots: int  # KV slots of each data-parallel scheduler
    cut_prompts: int  # prompts that the server cut, because they exceeded its context or KV slots
    cpu_seconds: float  # CPU time of the server's schedulers and the processes they started

    def totals(self) -> list[dict[str, Any]]:
        """The totals of each scheduler."""
        return [report.get("totals", {}) for report in self.reports]


_Row = TypeVar("_Row", Response, Result, Moment)
CONFIG = "config.json"


class RunError(ValueError):
    """A run cannot be carried out or read; the message names the fault and its file, flag or server."""


@dataclass(frozen=True)
class Cell:
    """A task, method and seed of a run."""

    run: Path
    task: str
    method: str
    seed: int

    @property
    def folder(self) -> Path:
        return self.run / self.task / self.method / f"seed-{self.seed}"

    @property
    def measured(self) -> bool:
        return (self.folder / "server.json").is_file()

    def whole(self) -> Self:
        """Returns the cell itself. Raises RunError if it has not been measured."""
        if not self.measured:
            raise RunError(f"{self.folder}: not measured")
        return self

    def write(
        self, responses: Iterable[Response], timeline: Iterable[Moment], served: Served
    ) -> None:
        """Write all that was measured, ``server.json`` last, so that a cell with this file is complete."""
        self._write_rows("responses", responses)
        self._write_rows("timeline", timeline)
        write_json(self.folder / "server.json", asdict(served))

    def write_results(self, results: Iterable[Result]) -> None:
        """Write the grades, in place of earlier ones."""
        self._write_rows("results", results)

    def responses(self) -> list[Response]:
        """All attempts of all requests, including failed attempts, in the order in which they ended."""
        return self._rows("responses", Response)

    def answered(self) -> dict[str, Response]:
        """Complete responses by problem."""
        return {row.problem_id: row for row in self.responses() if row.error is None}

    def results(self) -> list[Result]:
        return self._rows("results", Result)

    def timeline(self) -> list[Moment]:
        return self._rows("timeline", Moment)

    def served(self) -> Served:
        """What the server did. Raises OSError if the cell has not been measured."""
        return Served(**json.loads((self.folder / "server.json").read_text(encoding="utf-8")))

    def _write_rows(self, name: str, rows: Iterable[Response | Moment | Result]) -> None:
        # json.dumps writes ASCII, so that lone surrogates in a response are kept.
        lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
        write_whole(self.folder / f"{name}.jsonl", lines)

    def _rows(self, name: str, kind: type[_Row]) -> list[_Row]:
        """The rows of a file, [] if there is no file. Raises RunError if a line is bad."""
        path = self.folder / f"{name}.jsonl"
        if not path.is_file():
            return []
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            return [kind(**json.loads(line)) for line in lines]
        except (ValueError, TypeError) as error:
            raise RunError(f"{path}: {error}") from error


def cells(run: Path) -> list[Cell]:
    """The measured cells, in the order of ``config.json``. Raises RunError if ``run`` is no run's folder."""
    config = read_config(run)
    places = itertools.product(*(config[name] for name in ("tasks", "methods", "seeds")))
    return [cell for place in places if (cell := Cell(run, *place)).measured]


def read_config(run: Path) -> dict[str, Any]:
    """Returns ``config.json``, which lists tasks, methods and seeds. Raises RunError if missing or broken."""
    path = run / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: {error}") from error
    for key in ("tasks", "methods", "seeds"):
        if not isinstance(config, dict) or not isinstance(config.get(key), list):
            raise RunError(f"{path}: {key!r} must be a list")
    return dict(config)


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all; make its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Lock a run's folder; make it if needed. Raises RunError if another process holds the lock."""
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(f"{run / 'lock'}: another process works in this folder") from error
    try:
        yield
    finally:
        lock.release()
