# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905 - mathematical signs look alike on purpose; word lists stay readable
"""Which part of prose is formal: plain mathematics, numbers, variables.

Most reasoning models write mathematics without any mark-up ("so x + 1 = 2"), so every word of
plain text is decided upon here. Nothing formal may get lost: two steps that differ in one digit
or variable must get different trees. In case of doubt a word therefore counts as formal, which
costs at most a missed sharing.

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

from collections.abc import Sequence

from sglang_reasoncache.filter.structure.emit import emit
from sglang_reasoncache.filter.structure.limits import Limits, OverBound
from sglang_reasoncache.filter.structure.scan import (
    LONG_OPERATORS,
    SHORT_OPERATORS,
    Raw,
    RawToken,
    scan,
)
from sglang_reasoncache.filter.structure.vocabulary import (
    FUNCTIONS,
    OPERATORS,
    SEPARATOR,
    STRONG,
    Token,
)

_MAX_CAPITALS = 6
_ENGLISH_LETTERS = frozenset("aAI")
_AFTER_VARIABLE_A = frozenset(
    "is and or equals be was are to plus minus times over has gives must can we so then "
    "by from into with as".split()
)
_EMPHASIS = frozenset({"*", "**", "_", "__"})
_HYPHENS = frozenset("-−–")
# Operators and scripts that make any neighbouring word an operand.
_STRONG_SIGNS = frozenset({"^", "_", "**", "__", "√"}) | {
    sign for sign in (*LONG_OPERATORS, *SHORT_OPERATORS) if OPERATORS.get(sign, sign) in STRONG
}

# Plain ints and names at module level: looked up for every token.
_NUMBER, _WORD, _OPERATOR = int(Raw.NUMBER), int(Raw.WORD), int(Raw.OPERATOR)
_SUP, _SUB = int(Raw.SUPERSCRIPT), int(Raw.SUBSCRIPT)
_OPEN, _CLOSE, _NEWLINE = int(Raw.OPEN), int(Raw.CLOSE), int(Raw.NEWLINE)
_SYMBOL, _PRIME = int(Raw.SYMBOL), int(Raw.PRIME)
_SOLID = frozenset({_NUMBER, _WORD, _SUP, _SUB, _OPEN, _CLOSE, int(Raw.COMMAND)})
_ALWAYS = frozenset({_NUMBER, _SUP, _SUB, int(Raw.TEXT_ARGUMENT), int(Raw.COMMAND)})
_EDGE = RawToken(_NEWLINE, "\n", -2, -2)


def formal_flags(raw: Sequence[RawToken], limits: Limits) -> bytearray:
    """One flag per raw token of plain text: 1 where it is formal.

    Raises:
        OverBound: brackets nested deeper than ``limits.max_depth``.
    """
    flags = bytearray(len(raw))
    padded = [_EDGE, *raw, _EDGE]
    for i, token in enumerate(raw):
        group, before = token.group, padded[i]
        if group == _WORD:
            flags[i] = _is_formal_word(padded, i + 1)
        elif group == _OPERATOR:
            flags[i] = _is_formal_operator(padded, i + 1)
        elif group in _ALWAYS or (group == _SYMBOL and token.text != "!"):
            flags[i] = 1
        elif group in (_SYMBOL, _PRIME):
            flags[i] = before.end == token.start and _is_operand(before)
    _flag_brackets(raw, flags, limits.max_depth)
    return flags


def _is_operand(token: RawToken) -> bool:
    """A number, single letter, name in capitals, script or closing bracket."""
    if token.group == _WORD:
        return len(token.text) == 1 or _is_name(token.text)
    return token.group in (_NUMBER, _CLOSE, _SUP, _SUB, Raw.PRIME)


def _is_name(word: str) -> bool:
    return len(word) <= _MAX_CAPITALS and word.isupper()


def _is_formal_word(padded: Sequence[RawToken], i: int) -> bool:
    before, token, after = padded[i - 1], padded[i], padded[i + 1]
    word = token.text
    if len(word) == 1:
        return word not in _ENGLISH_LETTERS or _is_variable(padded, i)
    if word in FUNCTIONS or word == "mod" or _is_name(word):
        return True
    if after.start == token.end and after.group in (_OPEN, _SUP, _SUB, _NUMBER):
        return True
    if before.end == token.start and before.group == _NUMBER:
        return True
    return _is_strong(padded, i - 1) or _is_strong(padded, i + 1)


def _is_variable(padded: Sequence[RawToken], i: int) -> bool:
    """Whether ``a``, ``A`` or ``I`` at ``i`` is a variable, not an English word."""
    before, token, after = padded[i - 1], padded[i], padded[i + 1]
    for near in (before, after):
        if near.group in (_NUMBER, _SUP, _SUB):
            return True
        if near.group == _WORD and len(near.text) == 1:
            return True
    if before.group == _OPERATOR and _is_formal_operator(padded, i - 1):
        return True
    if after.group != _WORD:
        return True
    return token.text != "I" and after.text in _AFTER_VARIABLE_A


def _is_strong(padded: Sequence[RawToken], i: int) -> bool:
    """The token is an operator that makes any neighbouring word an operand."""
    token = padded[i]
    if token.group != _OPERATOR or token.text not in _STRONG_SIGNS:
        return False
    return not _is_emphasis(padded, i)


def _is_emphasis(padded: Sequence[RawToken], i: int) -> bool:
    """Markdown: ``**word`` or ``word**``, open to the other side."""
    token = padded[i]
    if token.text not in _EMPHASIS:
        return False
    before, after = padded[i - 1], padded[i + 1]
    left = before.end == token.start and before.group in _SOLID
    right = after.start == token.end and after.group in _SOLID
    if left == right:
        return False
    near = before if left else after
    return near.group == _WORD and len(near.text) > 1


def _is_formal_operator(padded: Sequence[RawToken], i: int) -> bool:
    before, token, after = padded[i - 1], padded[i], padded[i + 1]
    if token.text in _HYPHENS:
        if before.group == _NEWLINE and after.start != token.end:
            return False  # list bullet
        if after.group in (_OPEN, Raw.COMMAND):
            return True
        operands = [near.text for near in (before, after) if _is_operand(near)]
        # "word - a better way": the article alone makes no difference of the dash.
        return len(operands) == 2 or any(text not in _ENGLISH_LETTERS for text in operands)
    return not _is_emphasis(padded, i)


def _flag_brackets(raw: Sequence[RawToken], flags: bytearray, max_depth: int) -> None:
    """Flag the bracket pairs worth keeping; unmatched brackets are dropped.

    Any closing bracket ends the innermost open one, as in ``[0, 1)``.
    """
    stack: list[tuple[int, int]] = []
    num_formal = 0
    for i, token in enumerate(raw):
        if token.group == _OPEN:
            stack.append((i, num_formal))
            if len(stack) > max_depth:
                raise OverBound("max_depth")
        elif token.group != _CLOSE:
            num_formal += flags[i]
        elif stack:
            at, before = stack.pop()
            applied = at > 0 and flags[at - 1] and raw[at - 1].end == raw[at].start
            if num_formal > before or applied:
                flags[at] = flags[i] = 1


def plain_tokens(text: str, limits: Limits) -> list[Token]:
    """Parser tokens of plain text: formal ones, prose as separators.

    Raises:
        OverBound: see :func:`scan` and :func:`formal_flags`.
    """
    raw = scan(text, limits.max_nodes)
    flags = formal_flags(raw, limits)
    tokens: list[Token] = []
    for token, is_formal in zip(raw, flags, strict=True):
        if is_formal:
            emit(token, tokens, limits.max_nodes)
        elif tokens and tokens[-1] is not SEPARATOR:
            tokens.append(SEPARATOR)
        # One script of many characters is one raw token and many parser tokens.
        if len(tokens) > limits.max_nodes:
            raise OverBound("max_nodes")
    return tokens
