# SPDX-License-Identifier: Apache-2.0
"""What an operator sees while a run goes on: bars at the bottom, lines above them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class Display(Progress):
    """One bar a cell. A context manager."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            # Drawing shares the processors with a server without a GPU.
            refresh_per_second=2,
        )

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[], None]]:
        """A bar, as what moves it by one."""
        number = self.add_task(title, total=total, completed=done)
        try:
            yield lambda: self.advance(number)
        finally:
            self.remove_task(number)

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)
