# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001 - mathematical signs look alike on purpose; word lists stay readable
"""Raw lexical tokens of mathematical text, and the split of a step in regions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from sglang_reasoncache.filter.structure.limits import OverBound
from sglang_reasoncache.filter.structure.vocabulary import LATEX_TEXT

_SUP = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ"
_SUB = "₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ"
_LETTER = rf"[^\W\d_{_SUP}{_SUB}]"

# Spellings of operators: the longer ones in the order in which they are tried.
LONG_OPERATORS = (
    "<=>", "<->", "==>", "==", "=>", "->", "<=", ">=", "!=", ":=", "**", "__", "//",
)  # fmt: skip
SHORT_OPERATORS = "-+*/^_=<>~−–·×∙∗÷∕±∓≤≥≠≈≡∼≅∝∈∉∋⊂⊆⊃⊇⊥∥∣∤≪≫≺≻∪∩⊕∖∘⊗∧∨¬→⇒⇔⟹⟺↔↦∴∵√∂∇∀∃"
_OPERATOR = "|".join(map(re.escape, LONG_OPERATORS)) + rf"|[{re.escape(SHORT_OPERATORS)}]"


class Raw(IntEnum):
    """Groups of the scanner, in the order of its alternatives."""

    NUMBER = 1
    WORD = 2
    SUPERSCRIPT = 3
    SUBSCRIPT = 4
    OPERATOR = 5
    SYMBOL = 6
    OPEN = 7
    CLOSE = 8
    TEXT = 9
    """A command whose argument is one leaf; the next group is the argument."""
    TEXT_ARGUMENT = 10
    COMMAND = 11
    NEWLINE = 12
    PRIME = 13
    OTHER = 14


# No two alternatives inside a repetition can match the same text, so matching
# is linear. Digits stay text: no number is ever converted.
_SCANNER = re.compile(
    r"(\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
    rf"|({_LETTER}+(?:['’]{_LETTER}+)*)"
    rf"|([{_SUP}]+)|([{_SUB}]+)"
    rf"|({_OPERATOR})"
    r"|([∑∏∫∞°%∠△∅|!])"
    r"|([(\[{⌊⌈⟨])|([)\]}⌋⌉⟩])"
    rf"|\\({LATEX_TEXT})\*?[ \t]*\{{([^{{}}]*)\}}"
    r"|\\([A-Za-z]+|.|$)"
    r"|(\n)|(['′’]+)|(\S)",
    re.DOTALL,
)


class RawToken(NamedTuple):
    """One scanned piece; ``start`` and ``end`` are character offsets."""

    group: int
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
        group = match.lastindex or Raw.OTHER
        value = match[group]
        if group == Raw.TEXT_ARGUMENT:
            value = f"{match[Raw.TEXT]}:{value.strip()}"
        found.append(RawToken(group, value, match.start(), match.end()))
        if len(found) > max_tokens:
            raise OverBound("max_nodes")
    return found


class RegionKind(IntEnum):
    """How a part of a step is to be read."""

    PLAIN = 0
    LATEX = 1
    CODE = 2


Region = tuple[RegionKind, str]

_FENCE = "```"
_OPENER = re.compile(r"```|`|\\\[|\\\(|\$\$|\$")
_CLOSERS = {_FENCE: _FENCE, "`": "`", "\\[": "\\]", "\\(": "\\)", "$$": "$$", "$": "$"}


def leaves_fence_open(text: str, in_code: bool) -> bool:
    """Whether a code fence is open after ``text``, given its state before."""
    return in_code ^ bool(text.count(_FENCE) % 2)


def regions(text: str, in_code: bool = False) -> Iterator[Region]:
    """Split a step in plain text, LaTeX and code, in order; no region is empty.

    Delimiters are dropped. An unterminated fence reaches to the end; any other unterminated
    delimiter is plain text. A generator, so that a reader at a bound saves the rest.

    Args:
        in_code: the step begins inside a fence.
    """
    plain_start = pos = 0
    if in_code:
        inside, _, _ = text.partition(_FENCE)
        if inside:
            yield RegionKind.CODE, inside
        plain_start = pos = len(inside) + len(_FENCE)
    # Closers known to be missing from here on: searching again for every
    # opener would make hostile text quadratic.
    missing: set[str] = set()
    while (match := _OPENER.search(text, pos)) is not None:
        opener = match[0]
        pos = match.end()
        stop = -1 if opener in missing else text.find(_CLOSERS[opener], pos)
        if stop < 0:
            missing.add(opener)
            if opener != _FENCE:
                continue
            stop = len(text)
        if not _is_span(text, opener, pos, stop):
            continue
        if plain_start < match.start():
            yield RegionKind.PLAIN, text[plain_start : match.start()]
        kind, inside = _region(opener, text[pos:stop])
        if inside:
            yield kind, inside
        plain_start = pos = stop + len(_CLOSERS[opener])
    if plain_start < len(text):
        yield RegionKind.PLAIN, text[plain_start:]


def _is_span(text: str, opener: str, start: int, stop: int) -> bool:
    """Tell inline code and ``$x$`` from stray back-ticks and amounts of money."""
    if opener not in "`$":
        return True
    inside = text[start:stop]
    if not inside or "\n" in inside:
        return False
    # Pandoc's rule: no space inside the dollars, no digit after the second.
    spaced = inside[0].isspace() or inside[-1].isspace()
    return opener == "`" or not (spaced or text[stop + 1 : stop + 2].isdigit())


def _region(opener: str, inside: str) -> Region:
    if opener == _FENCE:
        first, newline, rest = inside.partition("\n")
        # The info string ("python") is not part of the code.
        is_info = bool(newline) and not first.strip(" \t\r").count(" ")
        return RegionKind.CODE, rest if is_info else inside
    return (RegionKind.CODE if opener == "`" else RegionKind.LATEX), inside
