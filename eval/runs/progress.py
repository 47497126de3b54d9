# SPDX-License-Identifier: Apache-2.0
"""What an operator sees while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class Meter:
    """Text that arrived: a speed to look at, not to report."""

    def __init__(self) -> None:
        self.characters = 0
        self._began = time.monotonic()

    def count(self, characters: int) -> None:
        self.characters += characters

    @property
    def per_second(self) -> float:
        return self.characters / max(time.monotonic() - self._began, 1e-9)


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        meter = task.fields.get("meter")
        return Text("" if meter is None else f"{meter.per_second:,.0f} characters/s")


class Bar:
    """One cell's bar."""

    def __init__(self, progress: Progress, title: str, total: int, done: int = 0) -> None:
        self.meter = Meter()
        self._progress = progress
        self._id = progress.add_task(title, total=total, completed=done, meter=self.meter)

    def advance(self) -> None:
        self._progress.advance(self._id)

    def close(self) -> None:
        self._progress.remove_task(self._id)


class Display:
    """Bars at the bottom, lines above them."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            _Speed(),
            TimeElapsedColumn(),
            console=console or Console(),
            # Drawing shares the processors with a server without a GPU.
            refresh_per_second=2,
        )

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Bar]:
        bar = Bar(self._progress, title, total, done)
        try:
            yield bar
        finally:
            bar.close()

    def say(self, text: str, style: str | None = None) -> None:
        self._progress.console.print(Text(text, style=style or ""), soft_wrap=True)
