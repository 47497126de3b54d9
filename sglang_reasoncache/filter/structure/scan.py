# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose
"""A step cut in plain text, LaTeX and code, and mathematical text cut in raw tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from sglang_reasoncache.filter.structure.signs import (
    LATEX_TEXT,
    LONG_OPERATORS,
    SHORT_OPERATORS,
    SUBSCRIPTS,
    SUPERSCRIPTS,
)
from sglang_reasoncache.filter.structure.tree import OverBound

_SUP, _SUB = ("".join(map(chr, table)) for table in (SUPERSCRIPTS, SUBSCRIPTS))
_LETTER = rf"[^\W\d_{_SUP}{_SUB}]"

# No two alternatives inside a repetition can match the same text, so matching
# is linear. Digits stay text: no number is ever converted.
_SCANNER = re.compile(
    r"(?P<number>\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
    rf"|(?P<word>{_LETTER}+(?:['’]{_LETTER}+)*)"
    rf"|(?P<sup>[{_SUP}]+)|(?P<sub>[{_SUB}]+)"
    rf"|(?P<operator>{'|'.join(map(re.escape, LONG_OPERATORS))}|[{re.escape(SHORT_OPERATORS)}])"
    r"|(?P<symbol>[∑∏∫∞°%∠△∅|!])"
    r"|(?P<open>[(\[{⌊⌈⟨])|(?P<close>[)\]}⌋⌉⟩])"
    rf"|\\(?P<text>{LATEX_TEXT})\*?[ \t]*\{{(?P<argument>[^{{}}]*)\}}"
    r"|\\(?P<command>[A-Za-z]+|.|$)"
    r"|(?P<newline>\n)|(?P<prime>['′’]+)|(?P<other>\S)",
    re.DOTALL,
)


class RawToken(NamedTuple):
    """A piece that the scanner's ``group`` matched; ``start`` and ``end`` count characters."""

    group: str
    text: str
    start: int
    end: int


def scan(text: str, max_tokens: int) -> list[RawToken]:
    """Cut mathematical text into raw tokens; spaces only separate them.

    Raises:
        OverBound: more than ``max_tokens`` tokens.
    """
    found: list[RawToken] = []
    for match in _SCANNER.finditer(text):
        group = match.lastgroup or "other"
        value = match[group]
        if group == "argument":
            value = f"{match['text']}:{value.strip()}"
        found.append(RawToken(group, value, match.start(), match.end()))
        if len(found) > max_tokens:
            raise OverBound("max_nodes")
    return found


Region = tuple[Literal["plain", "latex", "code"], str]

_FENCE = "```"
_OPENER = re.compile(r"```|`|\\\[|\\\(|\$\$|\$")
_CLOSERS = {"\\[": "\\]", "\\(": "\\)"}


def leaves_fence_open(text: str, in_code: bool) -> bool:
    """Whether a code fence is open after ``text``, given its state before."""
    return in_code ^ bool(text.count(_FENCE) % 2)


def regions(text: str, in_code: bool = False) -> Iterator[Region]:
    """Split a step in plain text, LaTeX and code, in order; no region is empty.

    Delimiters are left out. An unterminated fence reaches to the end; any other unterminated
    delimiter is plain text. A generator, so that a reader at a bound saves the rest.

    Args:
        in_code: the step begins inside a fence.
    """
    plain_start = pos = 0
    if in_code:
        inside, _, _ = text.partition(_FENCE)
        if inside:
            yield "code", inside
        plain_start = pos = len(inside) + len(_FENCE)
    # Closers known to be missing from here on: searching again for every
    # opener would make hostile text quadratic.
    missing: set[str] = set()
    while (match := _OPENER.search(text, pos)) is not None:
        opener = match[0]
        closer = _CLOSERS.get(opener, opener)
        pos = match.end()
        stop = -1 if opener in missing else text.find(closer, pos)
        if stop < 0:
            missing.add(opener)
            if opener != _FENCE:
                continue
            stop = len(text)
        inside = text[pos:stop]
        if opener in "`$" and not _is_span(inside, opener, text[stop + 1 : stop + 2]):
            continue
        if plain_start < match.start():
            yield "plain", text[plain_start : match.start()]
        if opener == _FENCE:
            first, newline, rest = inside.partition("\n")
            # The info string ("python") is not part of the code.
            if newline and " " not in first.strip(" \t\r"):
                inside = rest
        if inside:
            yield "code" if "`" in opener else "latex", inside
        plain_start = pos = stop + len(closer)
    if plain_start < len(text):
        yield "plain", text[plain_start:]


def _is_span(inside: str, opener: str, behind: str) -> bool:
    """Tell inline code and ``$x$`` from stray back-ticks and amounts of money."""
    if not inside or "\n" in inside:
        return False
    # Pandoc's rule: no space inside the dollars, no digit after the second.
    spaced = inside[0].isspace() or inside[-1].isspace()
    return opener == "`" or not (spaced or behind.isdigit())
