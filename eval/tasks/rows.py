# SPDX-License-Identifier: Apache-2.0
"""Rows of a data set, out of a local JSONL file or from the Hugging Face hub."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

from eval.jsonl import kind_of, read_object, valid_text
from eval.tasks.task import Problem, Source, TaskError

MAX_LINE_BYTES = 16 << 20
MAX_ROWS = 100_000
_MAX_ARCHIVE_BYTES = 1 << 30


@dataclass(frozen=True)
class Hub:
    """Where a data set lies on the Hugging Face hub.

    Attributes:
        dataset: owner and name.
        config: its configuration.
        split: which of its splits.
        archive: a zip file in its repository that holds ``member``, for data sets whose loading
            script ``datasets`` 4 no longer runs.
        member: path of a JSONL file within the archive.
    """

    dataset: str
    config: str = "default"
    split: str = "test"
    archive: str = ""
    member: str = ""


@dataclass(frozen=True)
class Row:
    """One row and where it stands, ``file:line``. Fields go by any of several names."""

    values: Mapping[str, Any]
    where: str
    number: int

    def text(self, *names: str) -> str:
        """A field that holds text.

        Raises:
            TaskError: there is none, or it is empty or something else.
        """
        name, value = self._find(names)
        if not isinstance(value, str):
            raise self.fault(f"field {name!r} is no text but {kind_of(value)}")
        if not value.strip():
            raise self.fault(f"field {name!r} is empty")
        return valid_text(value)

    def words(self, *names: str) -> str:
        """As `text`; a whole number counts as its digits."""
        name, value = self._find(names)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and abs(value) < 10**30:
            return str(value)
        if whole:
            raise self.fault(f"field {name!r} is a number of more than 30 digits")
        return self.text(name)

    def texts(self, *names: str) -> list[str]:
        """A field that holds a list of texts, or one text."""
        name, value = self._find(names)
        if isinstance(value, str):
            return [self.text(name)]
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.fault(f"field {name!r} is no list of texts but {kind_of(value)}")
        if not value or not all(v.strip() for v in value):
            raise self.fault(f"field {name!r} is empty")
        return [valid_text(v) for v in value]

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def id(self, default: str, *names: str) -> str:
        """The row's name for itself, else ``default`` and its number."""
        present = [name for name in names if self.has(name)]
        return self.words(*present) if present else f"{default}-{self.number}"

    def fault(self, what: str) -> TaskError:
        return TaskError(f"{self.where}: {what}")

    def _find(self, names: tuple[str, ...]) -> tuple[str, Any]:
        for name in names:
            if self.has(name):
                return name, self.values[name]
        others = f" (nor {', '.join(map(repr, names[1:]))})" if names[1:] else ""
        raise self.fault(f"no field {names[0]!r}{others}")


def load(task: str, source: Source, hub: Hub, build: Callable[[Row], Problem]) -> list[Problem]:
    """The problems of a data set, as many as ``source.limit`` says.

    Args:
        task: name of the task, for messages.
        source: a file, or the hub when it names none.
        build: turns one row into a problem.

    Raises:
        TaskError: names ``file:line`` and the fault, or the data set that cannot be had.
    """
    found: dict[str, tuple[Problem, str]] = {}
    with ExitStack() as files:
        rows = _file_rows(source, files) if source.path else _hub_rows(task, hub, files)
        for row in islice(rows, source.limit):
            if len(found) == MAX_ROWS:
                raise row.fault(f"more than {MAX_ROWS} rows")
            problem = build(row)
            if problem.id in found:
                raise row.fault(f"duplicate id {problem.id!r}, first at {found[problem.id][1]}")
            found[problem.id] = problem, row.where
    if not found and source.limit != 0:
        raise TaskError(f"{source.path or hub.dataset}: no rows")
    return [problem for problem, _ in found.values()]


def _file_rows(source: Source, files: ExitStack) -> Iterator[Row]:
    assert source.path is not None
    try:
        file = files.enter_context(source.path.open("rb"))
    except OSError as error:
        raise TaskError(f"{source.path}: {error.strerror or error}") from error
    return _jsonl_rows(file, str(source.path))


def _jsonl_rows(file: IO[bytes], name: str, max_bytes: int | None = None) -> Iterator[Row]:
    """Rows of an open JSONL file; blank lines are passed over."""
    number = size = 0
    while True:
        where = f"{name}:{number + 1}"
        try:
            line = file.readline(MAX_LINE_BYTES + 1)
        except (OSError, EOFError, zipfile.BadZipFile) as error:
            raise TaskError(f"{where}: cannot be read: {error}") from error
        if not line:
            return
        number += 1
        size += len(line)
        if len(line) > MAX_LINE_BYTES:
            raise TaskError(f"{where}: line longer than {MAX_LINE_BYTES} bytes")
        if max_bytes is not None and size > max_bytes:
            raise TaskError(f"{where}: more than {max_bytes} bytes")
        if not line.strip():
            continue
        try:
            yield Row(read_object(line), where, number)
        except ValueError as error:
            raise TaskError(f"{where}: {error}") from error


def _hub_rows(task: str, hub: Hub, files: ExitStack) -> Iterator[Row]:
    try:
        if hub.archive:
            return _archive_rows(hub, files)
        load_dataset = importlib.import_module("datasets").load_dataset
        table: Iterable[Mapping[str, Any]] = load_dataset(hub.dataset, hub.config, split=hub.split)
    # Whatever the hub's libraries raise (their own, httpx's, the operating system's) means one thing.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TaskError(
            f"--tasks {task}: cannot load data set {hub.dataset!r} from the Hugging Face hub "
            f"({reason}); --data {task}=FILE.jsonl takes a local file"
        ) from error
    return (
        Row(values, f"{hub.dataset}:{number}", number) for number, values in enumerate(table, 1)
    )


def _archive_rows(hub: Hub, files: ExitStack) -> Iterator[Row]:
    """Rows of a file within a zip archive, read in place: nothing is unpacked to disk."""
    download = importlib.import_module("huggingface_hub").hf_hub_download
    path = download(hub.dataset, hub.archive, repo_type="dataset")
    archive = files.enter_context(zipfile.ZipFile(path))
    member = files.enter_context(archive.open(hub.member))
    name = f"{hub.dataset}/{hub.archive}/{hub.member}"
    return _jsonl_rows(member, name, _MAX_ARCHIVE_BYTES)
