# SPDX-License-Identifier: Apache-2.0
"""The report while it is being written: Markdown and the numbers in it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.report.markdown import Table


@dataclass(frozen=True)
class Options:
    """What may be asked of a report.

    Attributes:
        out: folder to write to.
        heatmap_model: folder of a Hugging Face model; None: the run's own if it is local and
            not large; "": no heat map.
        redundancy_responses: dense responses a task whose redundancy is measured.
        say: told what is being done.
    """

    out: Path
    heatmap_model: Path | str | None = None
    redundancy_responses: int = 100
    say: Callable[[str], None] = print


@dataclass
class Page:
    """Markdown and numbers, as they come together."""

    options: Options
    lines: list[str] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    source: str = ""

    def heading(self, text: str) -> None:
        self.lines += [f"## {text}", ""]

    def say(self, *paragraphs: str) -> None:
        for paragraph in paragraphs:
            self.lines += [paragraph, ""]

    def table(self, table: Table | None, otherwise: str = "") -> None:
        """With where its numbers come from; or why there is none."""
        if table is None:
            if otherwise:
                self.say(otherwise)
            return
        self.tables[table.name] = table.to_dict()
        self.lines += [table.markdown(), self.source, ""]

    def figure(self, name: str, caption: str, data: Any, otherwise: str) -> None:
        """``data`` is what the figure shows, None if it was not drawn."""
        if data is None:
            self.say(f"*{caption}*: not drawn: {otherwise}.")
            return
        self.figures[name] = data
        self.say(f"![{caption}]({name}.png)", f"*{caption}.*")

    def path(self, name: str) -> Path:
        return self.options.out / f"{name}.png"


def slug(name: str) -> str:
    """Safe as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[:60] or "run"
