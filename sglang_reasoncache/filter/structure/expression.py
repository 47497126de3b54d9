# SPDX-License-Identifier: Apache-2.0
"""Operator precedence parser for mathematics: tokens to labelled ordered trees.

Total: every token list has exactly one reading, and no number, name or operator is ever
dropped. A missing operand becomes the empty leaf. Chains of one precedence level are one node
labelled with their operators, so ``a + b - c`` is ``("+ -", a, b, c)``; neighbouring operands
multiply.
"""

from __future__ import annotations

from sglang_reasoncache.filter.structure.limits import Limits, OverBound
from sglang_reasoncache.filter.structure.tree import Tree, leaf
from sglang_reasoncache.filter.structure.vocabulary import (
    COMMANDS,
    LEVELS,
    PREFIXES,
    PRODUCT_LEVEL,
    Kind,
    Token,
)

_EMPTY: Tree = leaf("")
_END: Token = (Kind.CLOSE, "")

_NUMBER, _NAME, _OPERATOR, _SCRIPT = Kind.NUMBER, Kind.NAME, Kind.OPERATOR, Kind.SCRIPT
_OPEN, _CLOSE, _SEPARATOR = Kind.OPEN, Kind.CLOSE, Kind.SEPARATOR
_FUNCTION, _COMMAND = Kind.FUNCTION, Kind.COMMAND
_OPERAND_STARTS = frozenset({_NUMBER, _NAME, _OPEN, _FUNCTION, _COMMAND})


def parse(tokens: list[Token], limits: Limits, latex: bool) -> list[Tree]:
    """Trees of a token list, one for each part between separators.

    Args:
        latex: scripts take one digit or group, as TeX reads ``x^12``.

    Raises:
        OverBound: nesting beyond ``limits.max_depth``.
    """
    return _Parser(tokens, limits.max_depth, latex).parse()


class _Parser:
    """One pass over one token list."""

    __slots__ = ("_depth", "_latex", "_max_depth", "_pos", "_tokens")

    def __init__(self, tokens: list[Token], max_depth: int, latex: bool) -> None:
        self._tokens = [*tokens, _END]
        self._pos = 0
        self._depth = 0
        self._max_depth = max_depth
        self._latex = latex

    def parse(self) -> list[Tree]:
        found = self._items()
        while self._pos < len(self._tokens) - 1:
            self._pos += 1  # a closing bracket that nothing opened
            found += self._items()
        return found

    def _items(self) -> list[Tree]:
        """Parts up to the next closing bracket, which is not consumed."""
        found: list[Tree] = []
        while True:
            kind = self._tokens[self._pos][0]
            if kind is _CLOSE:
                return found
            if kind is _SEPARATOR:
                self._pos += 1
            else:
                found.append(self._chain(1))

    def _level_ahead(self) -> int:
        """Binding strength of what comes next; 0 where the expression ends."""
        kind, value = self._tokens[self._pos]
        if kind is _OPERATOR:
            return LEVELS.get(value, PRODUCT_LEVEL)
        return PRODUCT_LEVEL if kind in _OPERAND_STARTS else 0

    def _chain(self, level: int) -> Tree:
        """Expression whose operators bind at least as strongly as ``level``."""
        left = self._prefixed()
        while True:
            here = self._level_ahead()
            if here < level:
                return left
            operators: list[str] = []
            operands = [left]
            while self._level_ahead() == here:
                kind, value = self._tokens[self._pos]
                if kind is _OPERATOR and value in LEVELS:
                    operators.append(value)
                    self._pos += 1
                else:
                    operators.append("*")
                operands.append(
                    self._prefixed() if here == PRODUCT_LEVEL else self._chain(here + 1)
                )
            left = (" ".join(operators), tuple(operands))

    def _prefixed(self) -> Tree:
        signs: list[str] = []
        while True:
            kind, value = self._tokens[self._pos]
            if kind is not _OPERATOR or value not in PREFIXES:
                break
            signs.append("sqrt" if value == "√" else f"unary {value}")
            self._pos += 1
            if len(signs) > self._max_depth:
                raise OverBound("max_depth")
        node = self._operand()
        for sign in reversed(signs):
            node = (sign, (node,))
        return node

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > self._max_depth:
            raise OverBound("max_depth")

    def _operand(self) -> Tree:
        """An atom with its scripts; the empty leaf where there is none."""
        self._descend()
        kind, value = self._tokens[self._pos]
        if kind is _NUMBER or kind is _NAME:
            self._pos += 1
            node = leaf(value)
        elif kind is _OPEN:
            node = self._group()
        elif kind is _FUNCTION:
            node = self._function(value)
        elif kind is _COMMAND:
            node = self._command(value)
        else:
            node = _EMPTY
        node = self._scripted(node)
        self._depth -= 1
        return node

    def _scripted(self, base: Tree) -> Tree:
        """Scripts in canonical order, so that x_1^2 equals x^2_1."""
        if self._tokens[self._pos][0] is not _SCRIPT:
            return base
        scripts: list[tuple[str, Tree]] = []
        while self._tokens[self._pos][0] is _SCRIPT:
            label = self._tokens[self._pos][1]
            self._pos += 1
            scripts.append((label, self._argument() if self._latex else self._exponent()))
        scripts.sort(key=lambda script: script[0])  # stable: repeated ones keep their order
        label = " ".join(script[0] for script in scripts)
        return label, (base, *(script[1] for script in scripts))

    def _group(self) -> Tree:
        opened = self._tokens[self._pos][1]
        self._pos += 1
        items = self._items()
        closed = self._tokens[self._pos][1]
        if self._pos < len(self._tokens) - 1:
            self._pos += 1
        if opened in "({" and len(items) == 1:
            return items[0]
        if opened == "{" and not items:
            return _EMPTY
        return opened + closed, tuple(items)

    def _function(self, label: str) -> Tree:
        """``sin x``, ``max(a, b)``, ``\\log_2 8``; a leaf where nothing follows."""
        self._pos += 1
        head = self._scripted(leaf(label))
        if self._tokens[self._pos][0] not in _OPERAND_STARTS:
            return head
        argument = self._operand()
        return ("apply", (head, argument)) if head[1] else (label, (argument,))

    def _command(self, name: str) -> Tree:
        """``\\frac{a}{b}``, ``\\sqrt[3]{x}`` and other braced commands."""
        self._pos += 1
        label, num_arguments = COMMANDS[name]
        arguments: list[Tree] = []
        if self._tokens[self._pos] == (_OPEN, "[") and label == "sqrt":
            arguments.append(self._nested_group())
        for _ in range(num_arguments):
            arguments.append(self._argument())
        return label, tuple(arguments)

    def _nested_group(self) -> Tree:
        """A bracket group that is not an operand; counts as one level all the same."""
        self._descend()
        node = self._group()
        self._depth -= 1
        return node

    def _argument(self) -> Tree:
        """What TeX takes as an argument: a group, a command or one character."""
        kind, value = self._tokens[self._pos]
        if kind is _OPEN and value == "{":
            return self._nested_group()
        if kind is _NUMBER and len(value) > 1:
            self._tokens[self._pos] = (_NUMBER, value[1:])
            return leaf(value[0])
        if kind is _FUNCTION or kind is _COMMAND:
            return self._operand()
        if kind in (_CLOSE, _SEPARATOR, _SCRIPT):
            return _EMPTY
        self._pos += 1
        return leaf(value)

    def _exponent(self) -> Tree:
        """Script in plain text: signs, then a whole number, name or group."""
        kind, value = self._tokens[self._pos]
        if kind is _OPEN:
            return self._nested_group()
        if kind is _OPERATOR and value in PREFIXES:
            return self._prefixed()
        if kind is _FUNCTION or kind is _COMMAND:
            return self._operand()
        if kind is _NUMBER or kind is _NAME:
            self._pos += 1
            return leaf(value)
        return _EMPTY
