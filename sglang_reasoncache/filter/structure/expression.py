# SPDX-License-Identifier: Apache-2.0
"""Operator precedence parser for mathematics: tokens to labelled ordered trees.

Total: every token list has exactly one reading, and no number, name or operator is ever
left out. A missing operand becomes the empty leaf. Chains of one precedence level are one node
labelled with their operators, so ``a + b - c`` is ``("+ -", a, b, c)``; neighbouring operands
multiply.
"""

from __future__ import annotations

from sglang_reasoncache.filter.structure.signs import (
    COMMANDS,
    LEVELS,
    PREFIXES,
    PRODUCT_LEVEL,
    Token,
)
from sglang_reasoncache.filter.structure.tree import Limits, OverBound, Tree, leaf

_EMPTY = leaf("")
_OPERAND_STARTS = frozenset({"number", "name", "open", "function", "command"})


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
        self._tokens = [*tokens, ("close", "")]
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
        while (kind := self._tokens[self._pos][0]) != "close":
            if kind == "separator":
                self._pos += 1
            else:
                found.append(self._chain(1))
        return found

    def _level_ahead(self) -> int:
        """Binding strength of what comes next; 0 where the expression ends."""
        kind, value = self._tokens[self._pos]
        if kind == "operator":
            return LEVELS.get(value, PRODUCT_LEVEL)
        return PRODUCT_LEVEL if kind in _OPERAND_STARTS else 0

    def _chain(self, level: int) -> Tree:
        """Expression whose operators bind at least as strongly as ``level``."""
        left = self._prefixed()
        while (here := self._level_ahead()) >= level:
            operators: list[str] = []
            operands = [left]
            while self._level_ahead() == here:
                kind, value = self._tokens[self._pos]
                is_written = kind == "operator" and value in LEVELS
                operators.append(value if is_written else "*")
                self._pos += is_written
                is_product = here == PRODUCT_LEVEL
                operands.append(self._prefixed() if is_product else self._chain(here + 1))
            left = (" ".join(operators), tuple(operands))
        return left

    def _prefixed(self) -> Tree:
        signs: list[str] = []
        while True:
            kind, value = self._tokens[self._pos]
            if kind != "operator" or value not in PREFIXES:
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
        if kind == "number" or kind == "name":
            self._pos += 1
            node = leaf(value)
        elif kind == "open":
            node = self._group()
        elif kind == "function":
            node = self._function(value)
        elif kind == "command":
            node = self._command(value)
        else:
            node = _EMPTY
        node = self._scripted(node)
        self._depth -= 1
        return node

    def _scripted(self, base: Tree) -> Tree:
        """Scripts in canonical order, so that x_1^2 equals x^2_1."""
        scripts: list[tuple[str, Tree]] = []
        while self._tokens[self._pos][0] == "script":
            label = self._tokens[self._pos][1]
            self._pos += 1
            scripts.append((label, self._argument() if self._latex else self._exponent()))
        if not scripts:
            return base
        scripts.sort(key=lambda script: script[0])  # stable: repeated ones keep their order
        labels, nodes = zip(*scripts, strict=True)
        return " ".join(labels), (base, *nodes)

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

    def _nested_group(self) -> Tree:
        """A bracket group that is not an operand; counts as one level all the same."""
        self._descend()
        node = self._group()
        self._depth -= 1
        return node

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
        has_index = label == "sqrt" and self._tokens[self._pos] == ("open", "[")
        arguments = [self._nested_group()] if has_index else []
        arguments += [self._argument() for _ in range(num_arguments)]
        return label, tuple(arguments)

    def _argument(self) -> Tree:
        """What TeX takes as an argument: a group, a command or one character."""
        kind, value = self._tokens[self._pos]
        if kind == "open" and value == "{":
            return self._nested_group()
        if kind == "number" and len(value) > 1:
            self._tokens[self._pos] = ("number", value[1:])
            return leaf(value[0])
        if kind == "function" or kind == "command":
            return self._operand()
        if kind in ("close", "separator", "script"):
            return _EMPTY
        self._pos += 1
        return leaf(value)

    def _exponent(self) -> Tree:
        """Script in plain text: signs, then a whole number, name or group."""
        kind, value = self._tokens[self._pos]
        if kind == "open":
            return self._nested_group()
        if kind == "operator" and value in PREFIXES:
            return self._prefixed()
        if kind == "function" or kind == "command":
            return self._operand()
        if kind == "number" or kind == "name":
            self._pos += 1
            return leaf(value)
        return _EMPTY
