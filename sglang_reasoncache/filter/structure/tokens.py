# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905 - mathematical signs look alike on purpose; word lists stay readable
"""Parser tokens of plain text or LaTeX: what is formal, and one spelling for each sign.

Most models write mathematics without mark-up ("so x + 1 = 2"), so every word of plain text is
decided upon here. Nothing formal may get lost: two steps that differ in one digit or variable must
get different trees. In case of doubt a word counts as formal: at most a sharing is missed.

* Numbers and scripts always count.
* A single letter counts. ``a``, ``A`` and ``I`` are English words as well and count only next
  to a number, an operator or another single letter, or where an article cannot stand: before
  punctuation, a closing bracket, the end, or (``a``, ``A``) before a verb or conjunction of a
  fixed short list.
* A word in capitals of at most 6 letters is a name: triangle ABC.
* Any word counts beside an operator other than a hyphen, before a touching bracket, script or
  digit, and after a touching digit: f(x), Area = 3, h_1, 3rd.
* A hyphen counts beside a number, single letter or bracket; a list bullet does not, nor does
  Markdown emphasis.
* A bracket pair counts if it holds something formal or applies a formal name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sglang_reasoncache.filter.structure import signs
from sglang_reasoncache.filter.structure.signs import COLUMN, SEPARATOR, WRITTEN, Kind, Token
from sglang_reasoncache.filter.structure.tree import Limits, OverBound

_SUP, _SUB = ("".join(map(chr, table)) for table in (signs.SUPERSCRIPTS, signs.SUBSCRIPTS))
_LONG = "|".join(map(re.escape, signs.LONG_OPERATORS))
_LETTER = rf"[^\W\d_{_SUP}{_SUB}]"

# No two alternatives inside a repetition can match the same text, so matching
# is linear. Digits stay text: no number is ever converted. The argument of
# ``\text`` is one name or a few words, kept as one leaf.
_SCANNER = re.compile(
    r"(?P<number>\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)"
    rf"|(?P<word>{_LETTER}+(?:['’]{_LETTER}+)*)"
    rf"|(?P<sup>[{_SUP}]+)|(?P<sub>[{_SUB}]+)"
    rf"|(?P<operator>{_LONG}|[{re.escape(signs.SHORT_OPERATORS)}])"
    r"|(?P<symbol>[∑∏∫∞°%∠△∅|!])"
    r"|(?P<open>[(\[{⌊⌈⟨])|(?P<close>[)\]}⌋⌉⟩])"
    r"|\\(?P<text>text|textbf|textit|textrm|mbox|mathrm|mathbf|mathit|mathsf|mathbb|mathcal"
    r"|operatorname|begin|end|label|tag)\*?[ \t]*\{(?P<argument>[^{}]*)\}"
    r"|\\(?P<command>[A-Za-z]+|.|$)"
    r"|(?P<newline>\n)|(?P<prime>['′’]+)|(?P<other>\S)",
    re.DOTALL,
)
_KINDS: dict[str, Kind] = {"number": "number", "open": "open", "close": "close"}
_SCRIPTS = {"sup": ("^", signs.SUPERSCRIPTS), "sub": ("_", signs.SUBSCRIPTS)}

_MAX_CAPITALS = 6
_ENGLISH_LETTERS = frozenset("aAI")
_AFTER_VARIABLE_A = frozenset(
    "is and or equals be was are to plus minus times over has gives must can we so then "
    "by from into with as".split()
)
_EMPHASIS = frozenset({"*", "**", "_", "__"})
_HYPHENS = frozenset("-−–")
_NUMERIC = frozenset({"number", "sup", "sub"})
_SOLID = frozenset({"number", "word", "sup", "sub", "open", "close", "command"})
_ALWAYS = frozenset({"number", "sup", "sub", "argument", "command", "operator", "symbol"})


class RawToken(NamedTuple):
    """A piece that the scanner's ``group`` matched; ``start`` and ``end`` count characters."""

    group: str
    text: str
    start: int
    end: int


_EDGE = RawToken("newline", "\n", -2, -2)


def parser_tokens(text: str, limits: Limits, latex: bool) -> list[Token]:
    """Parser tokens of plain text, prose as separators, or of the inside of a LaTeX formula,
    all of which is formal. OverBound: too many tokens, or in plain text nested brackets."""
    raw = _scan(text, limits.max_nodes)
    flags = b"\1" * len(raw) if latex else _formal_flags(raw, limits.max_depth)
    tokens: list[Token] = []
    for token, is_formal in zip(raw, flags, strict=True):
        if is_formal:
            found = _read(token, latex, limits.max_nodes)
            # "a &= b" aligns a relation; elsewhere "&" divides columns.
            if tokens[-1:] == [COLUMN] and found and found[0] in signs.RELATIONS:
                tokens.pop()
            tokens += found
        elif tokens and tokens[-1] is not SEPARATOR:
            tokens.append(SEPARATOR)
        # One script of many characters is one raw token and many parser tokens.
        if len(tokens) > limits.max_nodes:
            raise OverBound("max_nodes")
    return tokens


def _scan(text: str, max_tokens: int) -> list[RawToken]:
    """Mathematical text as raw tokens; spaces only separate them."""
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


def _read(raw: RawToken, latex: bool, max_tokens: int) -> list[Token]:
    """The parser tokens of one formal piece."""
    group, text = raw[:2]
    if group in _SCRIPTS:
        # x² is x^2, x⁻¹ is x^{-1}.
        label, table = _SCRIPTS[group]
        pieces = _scan(text.translate(table), max_tokens)
        parts = [token for piece in pieces for token in _read(piece, False, max_tokens)]
        if len(parts) > 1 or parts[0][0] == "operator":
            parts = [("open", "{"), *parts, ("close", "}")]
        return [("script", label), *parts]
    if group == "argument" and text.startswith(("begin:", "end:")):
        return [SEPARATOR, ("name", text), SEPARATOR]
    if latex and (group == "newline" or text == "~"):
        return []
    if latex and group == "word":
        # TeX reads adjoining letters as a product of variables.
        return [("name", letter) for letter in text]
    if group == "command":
        # An unknown one is a leaf of its own name.
        known = signs.LATEX.get(text, ("name", "\\" + text))
        return [known] if known else []
    return [WRITTEN.get(text) or (_KINDS.get(group, "name"), text)]


def _formal_flags(raw: Sequence[RawToken], max_depth: int) -> bytearray:
    """One flag per raw token of plain text: 1 where it is formal."""
    near = [_EDGE, *raw, _EDGE]
    for i in range(1, len(near) - 1):
        if near[i].group == "operator" and not _is_formal_operator(*near[i - 1 : i + 2]):
            near[i] = near[i]._replace(group="other")
    flags = bytearray(map(_is_formal, near, near[1:], near[2:]))
    _flag_brackets(raw, flags, max_depth)
    return flags


def _is_operand(token: RawToken) -> bool:
    """A number, single letter, name in capitals, script or closing bracket."""
    if token.group == "word":
        return len(token.text) == 1 or _is_name(token.text)
    return token.group in _NUMERIC or token.group in ("close", "prime")


def _is_name(word: str) -> bool:
    return len(word) <= _MAX_CAPITALS and word.isupper()


def _is_formal_operator(before: RawToken, token: RawToken, after: RawToken) -> bool:
    touches_left, touches_right = before.end == token.start, after.start == token.end
    if token.text in _EMPHASIS:
        # Markdown: ``**word`` or ``word**``, open to the other side.
        left = touches_left and before.group in _SOLID
        right = touches_right and after.group in _SOLID
        word = before if left else after
        return left == right or word.group != "word" or len(word.text) == 1
    if token.text not in _HYPHENS:
        return True
    if before.group == "newline" and not touches_right:
        return False  # list bullet
    if after.group in ("open", "command"):
        return True
    operands = [near.text for near in (before, after) if _is_operand(near)]
    # "word - a better way": the article alone makes no difference of the dash.
    return len(operands) == 2 or any(text not in _ENGLISH_LETTERS for text in operands)


def _is_formal(before: RawToken, token: RawToken, after: RawToken) -> bool:
    """Of anything but brackets; operators that are not formal are ``other`` here."""
    group, word = token.group, token.text
    if group == "prime" or (group == "symbol" and word == "!"):
        return before.end == token.start and _is_operand(before)
    if group != "word":
        return group in _ALWAYS
    if len(word) == 1:
        if word not in _ENGLISH_LETTERS or before.group == "operator" or after.group != "word":
            return True
        if before.group in _NUMERIC or (before.group == "word" and len(before.text) == 1):
            return True
        # What follows is a word.
        return len(after.text) == 1 or (word != "I" and after.text in _AFTER_VARIABLE_A)
    if word in WRITTEN or _is_name(word):
        return True
    if after.start == token.end and (after.group in _NUMERIC or after.group == "open"):
        return True
    if before.end == token.start and before.group == "number":
        return True
    return any(near.group == "operator" and near.text in signs.STRONG for near in (before, after))


def _flag_brackets(raw: Sequence[RawToken], flags: bytearray, max_depth: int) -> None:
    """Flag the bracket pairs worth keeping; unmatched brackets are left out.

    Any closing bracket ends the innermost open one, as in ``[0, 1)``.
    """
    stack: list[tuple[int, int]] = []
    num_formal = 0
    for i, token in enumerate(raw):
        if token.group == "open":
            stack.append((i, num_formal))
            if len(stack) > max_depth:
                raise OverBound("max_depth")
        elif token.group != "close":
            num_formal += flags[i]
        elif stack:
            at, before = stack.pop()
            applied = at > 0 and flags[at - 1] and raw[at - 1].end == raw[at].start
            if num_formal > before or applied:
                flags[at] = flags[i] = 1
