# SPDX-License-Identifier: Apache-2.0
"""Tables that know their numbers, and text that stays text in Markdown."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eval.measures.interval import Estimate, Spread

# An underscore inside a word is none of emphasis.
_SPECIAL = re.compile(r"[\\`*{}\[\]<>#|~$&@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.")

_MAX_CHARS = 160


@dataclass(frozen=True)
class Entry:
    """One cell of a table.

    Attributes:
        text: safe Markdown.
        value: the numbers behind it, for ``summary.json``.
        why: what is missing, where ``text`` is "-".
    """

    text: str
    value: Any = None
    why: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the report.

    Attributes:
        name: key in ``summary.json``.
        title: heading.
        columns: headings of the columns, safe Markdown.
        rows: one entry a column each.
        notes: sentences under it, safe Markdown.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = field(default_factory=list)

    def markdown(self) -> str:
        """Heading, table, notes, and a line for what is missing."""
        lines = [f"### {self.title}", "", _line(self.columns), _line(["---"] * len(self.columns))]
        lines += [_line([entry.text for entry in row]) for row in self.rows]
        lines.append("")
        for note in self.notes:
            lines += [note, ""]
        missing = dict.fromkeys(entry.why for row in self.rows for entry in row if entry.why)
        if missing:
            lines += [f"Missing (-): {'; '.join(map(plain, missing))}.", ""]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "columns": list(self.columns),
            "notes": list(self.notes),
            "rows": [
                [{"text": e.text, "value": as_json(e.value), "missing": e.why or None} for e in row]
                for row in self.rows
            ],
        }


def words(text: str) -> Entry:
    """Any text."""
    return Entry(plain(text), text)


def share(estimate: Estimate | None, why: str) -> Entry:
    """A mean score with its interval."""
    if estimate is None:
        return Entry("-", None, why)
    text = f"{estimate.value:.3f}"
    if estimate.low is not None and estimate.high is not None:
        text += f" ({estimate.low:.3f} to {estimate.high:.3f})"
    return Entry(text, estimate)


def signed(estimate: Estimate) -> Entry:
    """A difference of scores, in points of a hundred."""
    text = f"{100 * estimate.value:+.1f}"
    if estimate.low is not None and estimate.high is not None:
        text += f" ({100 * estimate.low:+.1f} to {100 * estimate.high:+.1f})"
    return Entry(text, estimate)


def spread(value: Spread | None, why: str, form: str = "{:.1f}") -> Entry:
    """A median, and the range where there are several."""
    if value is None:
        return Entry("-", None, why)
    text = form.format(value.median)
    low, high = form.format(value.low), form.format(value.high)
    if low != high:
        text += f" ({low} to {high})"
    return Entry(text, value)


def number(value: float | None, why: str = "", form: str = "{:.1f}") -> Entry:
    return Entry("-", None, why) if value is None else Entry(form.format(value), value)


def plain(text: str) -> str:
    """Text as it is, whatever it holds: one line, shortened, nothing in it is Markdown or HTML."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", _flat(text))


def code(text: str, most: int = _MAX_CHARS) -> str:
    """The same as a code span."""
    return "`" + (_flat(text, most).replace("`", "'").replace("|", "¦").strip() or " ") + "`"


def _flat(text: str, most: int = _MAX_CHARS) -> str:
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def as_json(value: Any) -> Any:
    """Dataclasses as objects."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
