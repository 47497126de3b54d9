# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: RUF001, SIM905 - mathematical signs look alike on purpose; word lists stay readable
"""Parser tokens of plain text or LaTeX: what is formal, and one spelling for each sign.

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

from sglang_reasoncache.filter.structure import signs
from sglang_reasoncache.filter.structure.scan import RawToken, scan
from sglang_reasoncache.filter.structure.signs import FUNCTIONS, LEVELS, SEPARATOR, Kind, Token
from sglang_reasoncache.filter.structure.tree import Limits, OverBound

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
    sign
    for sign in (*signs.LONG_OPERATORS, *signs.SHORT_OPERATORS)
    if signs.OPERATORS.get(sign, sign) in signs.STRONG
}
_SOLID = frozenset({"number", "word", "sup", "sub", "open", "close", "command"})
_ALWAYS = frozenset({"number", "sup", "sub", "argument", "command"})
_EDGE = RawToken("newline", "\n", -2, -2)

_KINDS: dict[str, Kind] = {
    "number": "number", "symbol": "name", "prime": "name", "open": "open", "close": "close",
}  # fmt: skip
_SCRIPTS = {"^": "^", "**": "^", "_": "_", "__": "_"}
# Mark of a column in a LaTeX table; a separator unless it aligns a relation.
_COLUMN: Token = ("separator", "&")
# Row mark, a lone backslash, delimiters of a formula that have no counterpart.
_NO_CONTENT = frozenset({"\\", "", "(", ")", "[", "]"})


def parser_tokens(text: str, limits: Limits, latex: bool) -> list[Token]:
    """Parser tokens of plain text, prose as separators, or of the inside of a LaTeX formula,
    all of which is formal.

    Raises:
        OverBound: more than ``max_nodes`` tokens, or brackets of plain text nested deeper than
            ``max_depth``.
    """
    raw = scan(text, limits.max_nodes)
    flags = b"\1" * len(raw) if latex else _formal_flags(raw, limits.max_depth)
    tokens: list[Token] = []
    for token, is_formal in zip(raw, flags, strict=True):
        if not is_formal:
            if tokens and tokens[-1] is not SEPARATOR:
                tokens.append(SEPARATOR)
        elif not latex:
            _emit(token, tokens, limits.max_nodes)
        elif token.group == "word":
            # TeX reads adjoining letters as a product of variables.
            tokens.extend(("name", letter) for letter in token.text)
        elif token.group == "other":
            tokens.append(_punctuation(token.text))
        elif token.group != "newline" and token.text != "~":
            _emit(token, tokens, limits.max_nodes)
        # One script of many characters is one raw token and many parser tokens.
        if len(tokens) > limits.max_nodes:
            raise OverBound("max_nodes")
    return tokens


def _emit(raw: RawToken, tokens: list[Token], max_tokens: int) -> None:
    """Append the parser tokens of one formal piece."""
    group, text = raw.group, raw.text
    if group in _KINDS:
        tokens.append((_KINDS[group], text))
    elif group == "word":
        mod: Kind = "operator" if text == "mod" else "name"
        tokens.append(("function" if text in FUNCTIONS else mod, text))
    elif group == "operator":
        _emit_operator(text, tokens)
    elif group == "command":
        _emit_command(text, tokens)
    elif group == "sup":
        _emit_script("^", text.translate(signs.SUPERSCRIPTS), tokens, max_tokens)
    elif group == "sub":
        _emit_script("_", text.translate(signs.SUBSCRIPTS), tokens, max_tokens)
    elif text.startswith(("begin:", "end:")):
        tokens += (SEPARATOR, ("name", text), SEPARATOR)
    else:
        tokens.append(("name", text))


def _emit_operator(text: str, tokens: list[Token]) -> None:
    if text in _SCRIPTS:
        tokens.append(("script", _SCRIPTS[text]))
        return
    label = signs.OPERATORS.get(text, text)
    # "a &= b" aligns a relation; elsewhere "&" divides columns.
    if tokens and tokens[-1] is _COLUMN and LEVELS.get(label) == LEVELS["="]:
        tokens.pop()
    tokens.append(("operator", label))


def _emit_command(name: str, tokens: list[Token]) -> None:
    """A LaTeX command; an unknown one is a leaf of its own name."""
    if name in signs.LATEX_IGNORED:
        return
    if name in signs.COMMANDS:
        tokens.append(("command", name))
    elif name in signs.LATEX_OPERATORS:
        _emit_operator(signs.LATEX_OPERATORS[name], tokens)
    elif name in signs.LATEX_BRACKETS:
        tokens.append(signs.LATEX_BRACKETS[name])
    elif name in FUNCTIONS:
        tokens.append(("function", name))
    elif name in _NO_CONTENT:
        tokens.append(SEPARATOR)
    else:
        tokens.append(("name", signs.LATEX_NAMES.get(name, "\\" + name)))


def _emit_script(script: str, text: str, tokens: list[Token], max_tokens: int) -> None:
    """Unicode superscript or subscript: x² is x^2, x⁻¹ is x^{-1}."""
    parts: list[Token] = []
    for raw in scan(text, max_tokens):
        _emit(raw, parts, max_tokens)
    if len(parts) > 1 or parts[0][0] == "operator":
        parts = [("open", "{"), *parts, ("close", "}")]
    tokens += (("script", script), *parts)


def _punctuation(text: str) -> Token:
    """Inside a formula."""
    if text == "&":
        return _COLUMN
    if text == ":":
        return "operator", ":"
    return SEPARATOR if text in ",;.?" else ("name", text)


def _formal_flags(raw: Sequence[RawToken], max_depth: int) -> bytearray:
    """One flag per raw token of plain text: 1 where it is formal."""
    flags = bytearray(len(raw))
    padded = [_EDGE, *raw, _EDGE]
    for i, token in enumerate(raw):
        group, before = token.group, padded[i]
        if group == "word":
            flags[i] = _is_formal_word(padded, i + 1)
        elif group == "operator":
            flags[i] = _is_formal_operator(padded, i + 1)
        elif group in _ALWAYS or (group == "symbol" and token.text != "!"):
            flags[i] = 1
        elif group == "symbol" or group == "prime":
            flags[i] = before.end == token.start and _is_operand(before)
    _flag_brackets(raw, flags, max_depth)
    return flags


def _is_operand(token: RawToken) -> bool:
    """A number, single letter, name in capitals, script or closing bracket."""
    if token.group == "word":
        return len(token.text) == 1 or _is_name(token.text)
    return token.group in ("number", "close", "sup", "sub", "prime")


def _is_name(word: str) -> bool:
    return len(word) <= _MAX_CAPITALS and word.isupper()


def _is_formal_word(padded: Sequence[RawToken], i: int) -> bool:
    before, token, after = padded[i - 1 : i + 2]
    word = token.text
    if len(word) == 1:
        return word not in _ENGLISH_LETTERS or _is_variable(padded, i)
    if word in FUNCTIONS or word == "mod" or _is_name(word):
        return True
    if after.start == token.end and after.group in ("open", "sup", "sub", "number"):
        return True
    if before.end == token.start and before.group == "number":
        return True
    return _is_strong(padded, i - 1) or _is_strong(padded, i + 1)


def _is_variable(padded: Sequence[RawToken], i: int) -> bool:
    """Whether ``a``, ``A`` or ``I`` at ``i`` is a variable, not an English word."""
    before, token, after = padded[i - 1 : i + 2]
    for near in (before, after):
        if near.group in ("number", "sup", "sub") or (near.group == "word" and len(near.text) == 1):
            return True
    if before.group == "operator" and _is_formal_operator(padded, i - 1):
        return True
    return after.group != "word" or (token.text != "I" and after.text in _AFTER_VARIABLE_A)


def _is_strong(padded: Sequence[RawToken], i: int) -> bool:
    """The token is an operator that makes any neighbouring word an operand."""
    token = padded[i]
    is_sign = token.group == "operator" and token.text in _STRONG_SIGNS
    return is_sign and not _is_emphasis(padded, i)


def _is_emphasis(padded: Sequence[RawToken], i: int) -> bool:
    """Markdown: ``**word`` or ``word**``, open to the other side."""
    before, token, after = padded[i - 1 : i + 2]
    if token.text not in _EMPHASIS:
        return False
    left = before.end == token.start and before.group in _SOLID
    right = after.start == token.end and after.group in _SOLID
    near = before if left else after
    return left != right and near.group == "word" and len(near.text) > 1


def _is_formal_operator(padded: Sequence[RawToken], i: int) -> bool:
    before, token, after = padded[i - 1 : i + 2]
    if token.text not in _HYPHENS:
        return not _is_emphasis(padded, i)
    if before.group == "newline" and after.start != token.end:
        return False  # list bullet
    if after.group in ("open", "command"):
        return True
    operands = [near.text for near in (before, after) if _is_operand(near)]
    # "word - a better way": the article alone makes no difference of the dash.
    return len(operands) == 2 or any(text not in _ENGLISH_LETTERS for text in operands)


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
