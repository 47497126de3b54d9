# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, and text that stays text in them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from eval.jsonl import one_line
from eval.measures.accuracy import Estimate

# An underscore inside a word is none of emphasis.
_SPECIAL = re.compile(r"[\\`*{}\[\]<>#|~$&@]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|:(?=//)|(?<=www)\.")
_MAX_CHARS = 160


@dataclass(frozen=True)
class Table:
    """A table of a document; ``rows`` by column, and ``notes`` under it, are safe Markdown.
    ``name`` is its key in ``summary.json``."""

    name: str
    title: str
    rows: Sequence[Mapping[str, str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Heading, table and notes."""
        columns = list(self.rows[0]) if self.rows else []
        lines = [columns, ["---"] * len(columns), *(row.values() for row in self.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join([f"### {self.title}", text, *self.notes]) + "\n"


def words(text: str) -> str:
    """Text as it is, whatever it holds: one line, shortened, nothing in it is Markdown or HTML."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", one_line(text, _MAX_CHARS))


def number(value: float | None, why: str = "", form: str = "{:.1f}") -> str:
    """``-`` where there is none, and why."""
    if value is None or pd.isna(value):
        return f"- ({why})" if why else "-"
    return form.format(value)


def interval(estimate: Estimate | None, form: str = "{:.3f}") -> str:
    """A value, and its interval in brackets."""
    if estimate is None:
        return "-"
    text = form.format(estimate.value)
    if estimate.low is not None and estimate.high is not None:
        text += f" ({form.format(estimate.low)} to {form.format(estimate.high)})"
    return text


def spread(values: pd.Series, form: str = "{:.1f}") -> str:
    """A median, and the range where there are several."""
    known = values.dropna().astype(float)
    if known.empty:
        return "-"
    middle, low, high = (form.format(v) for v in (known.median(), known.min(), known.max()))
    return middle if low == high else f"{middle} ({low} to {high})"
