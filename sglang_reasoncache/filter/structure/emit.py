# SPDX-License-Identifier: Apache-2.0
"""From raw tokens to parser tokens: one spelling for each sign."""

from __future__ import annotations

from sglang_reasoncache.filter.structure.limits import Limits, OverBound
from sglang_reasoncache.filter.structure.scan import Raw, RawToken, scan
from sglang_reasoncache.filter.structure.vocabulary import (
    COMMANDS,
    FUNCTIONS,
    LATEX_BRACKETS,
    LATEX_IGNORED,
    LATEX_NAMES,
    LATEX_OPERATORS,
    LEVELS,
    OPERATORS,
    SEPARATOR,
    SUBSCRIPTS,
    SUPERSCRIPTS,
    Kind,
    Token,
)

_SCRIPTS = {"^": "^", "**": "^", "_": "_", "__": "_"}
_RELATION = LEVELS["="]
# Mark of a column in a LaTeX table; a separator unless it aligns a relation.
_COLUMN: Token = (Kind.SEPARATOR, "&")

# Row mark, a lone backslash, delimiters of a formula that have no counterpart.
_NO_CONTENT = frozenset({"\\", "", "(", ")", "[", "]"})

_BY_GROUP: dict[int, Kind] = {
    Raw.NUMBER: Kind.NUMBER,
    Raw.SYMBOL: Kind.NAME,
    Raw.PRIME: Kind.NAME,
    Raw.OPEN: Kind.OPEN,
    Raw.CLOSE: Kind.CLOSE,
}


def emit(raw: RawToken, tokens: list[Token], max_tokens: int) -> None:
    """Append the parser tokens of one formal piece of plain text or LaTeX.

    Raises:
        OverBound: a script of more than ``max_tokens`` signs.
    """
    group, text = raw.group, raw.text
    kind = _BY_GROUP.get(group)
    if kind is not None:
        tokens.append((kind, text))
    elif group == Raw.WORD:
        is_function = text in FUNCTIONS
        tokens.append((Kind.FUNCTION if is_function else _kind_of(text), text))
    elif group == Raw.OPERATOR:
        _emit_operator(text, tokens)
    elif group == Raw.COMMAND:
        _emit_command(text, tokens)
    elif group == Raw.SUPERSCRIPT:
        _emit_script("^", text.translate(SUPERSCRIPTS), tokens, max_tokens)
    elif group == Raw.SUBSCRIPT:
        _emit_script("_", text.translate(SUBSCRIPTS), tokens, max_tokens)
    elif group != Raw.TEXT_ARGUMENT:
        tokens.append(SEPARATOR)
    elif text.startswith(("begin:", "end:")):
        tokens += (SEPARATOR, (Kind.NAME, text), SEPARATOR)
    else:
        tokens.append((Kind.NAME, text))


def latex_tokens(text: str, limits: Limits) -> list[Token]:
    """Parser tokens of the inside of a LaTeX formula; all of it is formal.

    Raises:
        OverBound: more than ``limits.max_nodes`` tokens.
    """
    tokens: list[Token] = []
    for raw in scan(text, limits.max_nodes):
        group = raw.group
        if group == Raw.WORD:
            # TeX reads adjoining letters as a product of variables.
            tokens.extend((Kind.NAME, letter) for letter in raw.text)
        elif group == Raw.OTHER:
            tokens.extend(_punctuation(raw.text))
        elif group != Raw.NEWLINE and raw.text != "~":
            emit(raw, tokens, limits.max_nodes)
        if len(tokens) > limits.max_nodes:
            raise OverBound("max_nodes")
    return tokens


def _kind_of(word: str) -> Kind:
    return Kind.OPERATOR if word == "mod" else Kind.NAME


def _emit_operator(text: str, tokens: list[Token]) -> None:
    script = _SCRIPTS.get(text)
    if script is not None:
        tokens.append((Kind.SCRIPT, script))
        return
    label = OPERATORS.get(text, text)
    # "a &= b" aligns a relation; elsewhere "&" divides columns.
    if tokens and tokens[-1] is _COLUMN and LEVELS.get(label) == _RELATION:
        tokens.pop()
    tokens.append((Kind.OPERATOR, label))


def _punctuation(text: str) -> tuple[Token, ...]:
    """Inside a formula."""
    if text == "&":
        return (_COLUMN,)
    if text == ":":
        return ((Kind.OPERATOR, ":"),)
    return (SEPARATOR,) if text in ",;.?" else ((Kind.NAME, text),)


def _emit_command(name: str, tokens: list[Token]) -> None:
    """A LaTeX command; an unknown one is a leaf of its own name."""
    if name in LATEX_IGNORED:
        return
    if name in COMMANDS:
        tokens.append((Kind.COMMAND, name))
    elif name in LATEX_OPERATORS:
        _emit_operator(LATEX_OPERATORS[name], tokens)
    elif name in LATEX_BRACKETS:
        tokens.append(LATEX_BRACKETS[name])
    elif name in FUNCTIONS:
        tokens.append((Kind.FUNCTION, name))
    elif name in _NO_CONTENT:
        tokens.append(SEPARATOR)
    else:
        tokens.append((Kind.NAME, LATEX_NAMES.get(name, "\\" + name)))


def _emit_script(script: str, text: str, tokens: list[Token], max_tokens: int) -> None:
    """Unicode superscript or subscript: x² is x^2, x⁻¹ is x^{-1}."""
    tokens.append((Kind.SCRIPT, script))
    parts: list[Token] = []
    for raw in scan(text, max_tokens):
        emit(raw, parts, max_tokens)
    if len(parts) > 1 or parts[0][0] is Kind.OPERATOR:
        parts = [(Kind.OPEN, "{"), *parts, (Kind.CLOSE, "}")]
    tokens.extend(parts)
