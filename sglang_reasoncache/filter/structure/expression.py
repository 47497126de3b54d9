# SPDX-License-Identifier: Apache-2.0
"""Operator precedence parser for mathematics: tokens to labelled ordered trees.

Total: every token list has exactly one reading, and no number, name or operator is ever
left out. A missing operand becomes the empty leaf. Chains of one precedence level are one node
labelled with their operators, so ``a + b - c`` is ``("+ -", a, b, c)``; neighbouring operands
multiply.
"""

from __future__ import annotations

from sglang_reasoncache.filter.structure import signs
from sglang_reasoncache.filter.structure.signs import LEVELS, PREFIXES, PRODUCT_LEVEL, Token
from sglang_reasoncache.filter.structure.tree import OverBound, Tree, leaf

_EMPTY = leaf("")
_OPERAND_STARTS = frozenset({"number", "name", "open", "function", "command"})


class Parser:
    """One pass over one token list. In ``latex`` a script takes one digit or group, as TeX
    reads ``x^12``."""

    __slots__ = ("_depth", "_latex", "_left", "_max_depth")

    def __init__(self, tokens: list[Token], max_depth: int, latex: bool) -> None:
        # The next one last; at the bottom one that ends every expression.
        self._left: list[Token] = [("close", ""), *reversed(tokens)]
        self._depth = 0
        self._max_depth = max_depth
        self._latex = latex

    def parse(self) -> list[Tree]:
        """Trees, one for each part between separators; OverBound for too deep a nesting."""
        found = self._items()
        while len(self._left) > 1:
            self._left.pop()  # a closing bracket that nothing opened
            found += self._items()
        return found

    def _items(self) -> list[Tree]:
        """Parts up to the next closing bracket, which is not consumed."""
        found: list[Tree] = []
        while (kind := self._left[-1][0]) != "close":
            if kind == "separator":
                self._left.pop()
            else:
                found.append(self._chain(1))
        return found

    def _level_ahead(self) -> int:
        """Binding strength of what comes next; 0 where the expression ends."""
        kind, value = self._left[-1]
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
                kind, value = self._left[-1]
                is_written = kind == "operator" and value in LEVELS
                operators.append(value if is_written else "*")
                if is_written:
                    self._left.pop()
                is_product = here == PRODUCT_LEVEL
                operands.append(self._prefixed() if is_product else self._chain(here + 1))
            left = (" ".join(operators), tuple(operands))
        return left

    def _prefixed(self) -> Tree:
        found: list[str] = []
        while self._left[-1][0] == "operator" and self._left[-1][1] in PREFIXES:
            sign = self._left.pop()[1]
            found.append("sqrt" if sign == "√" else f"unary {sign}")
            if len(found) > self._max_depth:
                raise OverBound("max_depth")
        node = self._operand()
        for sign in reversed(found):
            node = (sign, (node,))
        return node

    def _operand(self, scripted: bool = True) -> Tree:
        """An atom, with its scripts if ``scripted``; the empty leaf where there is none."""
        self._depth += 1
        if self._depth > self._max_depth:
            raise OverBound("max_depth")
        kind, value = self._left[-1]
        if kind == "open":
            node = self._group()
        elif kind not in _OPERAND_STARTS:
            node = _EMPTY
        else:
            self._left.pop()
            if kind == "function":
                node = self._function(value)
            else:
                node = self._command(value) if kind == "command" else leaf(value)
        if scripted:
            node = self._scripted(node)
        self._depth -= 1
        return node

    def _scripted(self, base: Tree) -> Tree:
        """Scripts in canonical order, so that x_1^2 equals x^2_1."""
        scripts: list[tuple[str, Tree]] = []
        while self._left[-1][0] == "script":
            scripts.append((self._left.pop()[1], self._argument(self._latex)))
        if not scripts:
            return base
        scripts.sort(key=lambda script: script[0])  # stable: repeated ones keep their order
        labels, nodes = zip(*scripts, strict=True)
        return " ".join(labels), (base, *nodes)

    def _group(self) -> Tree:
        opened = self._left.pop()[1]
        items = self._items()
        closed = self._left.pop()[1] if len(self._left) > 1 else ""
        if opened in "({" and len(items) == 1:
            return items[0]
        if opened == "{" and not items:
            return _EMPTY
        return opened + closed, tuple(items)

    def _function(self, label: str) -> Tree:
        """``sin x``, ``max(a, b)``, ``\\log_2 8``; a leaf where nothing follows."""
        head = self._scripted(leaf(label))
        if self._left[-1][0] not in _OPERAND_STARTS:
            return head
        argument = self._operand()
        return ("apply", (head, argument)) if head[1] else (label, (argument,))

    def _command(self, label: str) -> Tree:
        """``\\frac{a}{b}``, ``\\sqrt[3]{x}`` and other braced commands."""
        has_index = label == "sqrt" and self._left[-1] == ("open", "[")
        arguments = [self._operand(scripted=False)] if has_index else []
        arguments += [self._argument(True) for _ in range(1 + (label in signs.TWO_ARGUMENTS))]
        return label, tuple(arguments)

    def _argument(self, latex: bool) -> Tree:
        """What TeX takes as an argument: a group, a command or one character; in plain text
        signs, then a whole number, name or group."""
        kind, value = self._left[-1]
        if kind == "open" and (value == "{" or not latex):
            return self._operand(scripted=False)
        if kind == "function" or kind == "command":
            return self._operand()
        if kind == "operator" and not latex:
            return self._prefixed() if value in PREFIXES else _EMPTY
        if kind in ("close", "separator", "script"):
            return _EMPTY
        self._left.pop()
        if kind == "number" and latex and len(value) > 1:
            self._left.append((kind, value[1:]))
            return leaf(value[0])
        return leaf(value)
