# SPDX-License-Identifier: Apache-2.0
"""Parses a step into SymPy expressions, which are never evaluated.

Every token list has exactly one parse, which uses all tokens. A numeral is a Symbol; a missing operand
is a Symbol with an empty name. Neighbouring operands multiply. Terms of a sum are sorted in SymPy's
order. Factors keep their order, because neighbouring words of prose need not be a product.
"""

import re
from functools import cmp_to_key

from sympy import Add, Basic, Eq, Expr, Ge, Gt, Le, Lt, Mul, Ne, Pow, S, Symbol, Tuple

from sglang_reasoncache.filter.structure import Limits, OverBound
from sglang_reasoncache.filter.structure.tokens import LEVELS, Token, parser_tokens, regions

_RELATIONS = {"=": Eq, "!=": Ne, "<": Lt, "<=": Le, ">": Gt, ">=": Ge}
_PRODUCT_LEVEL = LEVELS["*"]
_OPERAND_STARTS = frozenset({"leaf", "open", "root", "fraction"})


class Written(Expr):  # type: ignore[misc]
    """An expression that has no class in SymPy. Its arguments: a Symbol that names its kind, then its parts."""

    is_commutative = False  # set here, because SymPy would otherwise compute it from all parts


def written(label: str, *parts: Basic) -> Basic:
    return Written(Symbol(label), *parts)


def read(text: str, limits: Limits, in_code: bool) -> Tuple | None:
    """The formal content of a step; None for prose. Raises OverBound if a bound is exceeded."""
    if len(text) > limits.max_chars:
        raise OverBound("max_chars")
    content: list[Basic] = []
    num_nodes = 0
    for kind, part in regions(f"```\n{text}" if in_code else text):
        # Code is split into words, signs, and line breaks together with the indentation that follows.
        words = re.findall(r"\n\s*|\w+|\S", part.strip()) if kind == "code" else []
        tokens = [] if kind == "code" else parser_tokens(part, kind == "latex")
        num_nodes += len(words) + len(tokens)
        if num_nodes > limits.max_nodes:
            raise OverBound("max_nodes")
        content += [written("code", *map(Symbol, words))] if words else []
        content += Parser(tokens, limits.max_depth, kind == "latex").parse()
    return Tuple(*content) if content else None


class Parser:
    """An operator precedence parser. It reads tokens, whose brackets must match, in one pass. If ``latex``,
    only the first digit of a number becomes an argument, because TeX reads ``x^12`` as ``x^{1}2``."""

    def __init__(self, tokens: list[Token], max_depth: int, latex: bool) -> None:
        # A stack of tokens, the next one on top. The closing bracket at the bottom marks the end of the input.
        self._left: list[Token] = [("close", ""), *reversed(tokens)]
        self._max_depth = max_depth
        self._latex = latex

    def parse(self) -> list[Basic]:
        """Parse expressions up to a closing bracket. Raises OverBound if they are nested too deeply."""
        expressions: list[Basic] = []
        while (kind := self._left[-1][0]) != "close":
            if kind == "separator":
                self._left.pop()
            else:
                expressions.append(self._chain(1))
        self._closed = self._left.pop()[1]
        return expressions

    def _level_ahead(self) -> int:
        """Binding strength of the next operator, or 0 if the expression ends."""
        kind, label = self._left[-1]
        return LEVELS[label] if kind == "operator" else _PRODUCT_LEVEL * (kind in _OPERAND_STARTS)

    def _chain(self, level: int) -> Basic:
        """Parse an expression up to the first operator that binds less strongly than ``level``."""
        left = self._operand()
        while (here := self._level_ahead()) >= level:
            operators: list[str] = []
            operands = [left]
            while self._level_ahead() == here:
                is_written = self._left[-1][0] == "operator"
                operators.append(self._left.pop()[1] if is_written else "*")
                operands.append(self._chain(here + 1))
            left = _join(operators, operands)
        return left

    def _operand(self, scripted: bool = True) -> Basic:
        """Parse an operand with signs and, if ``scripted``, scripts; an empty Symbol if no operand follows."""
        self._max_depth -= 1
        if self._max_depth < 0:
            raise OverBound("max_depth")
        kind, label = self._left[-1]
        if kind == "operator" and label in "-+±":
            self._left.pop()
            node = _join([label], [self._operand(scripted)])
        else:
            node = self._atom(kind, label)
            scripts: dict[str, list[Basic]] = {"_": [], "^": []}
            while scripted and self._left[-1][0] == "script":
                scripts[self._left.pop()[1]].append(self._argument())
            # Subscripts are applied first, so that x_1^2 equals x^2_1.
            if scripts["_"]:
                node = written("_", node, *scripts["_"])
            if scripts["^"]:
                node = Pow(node, Mul(*scripts["^"], evaluate=False), evaluate=False)
        self._max_depth += 1
        return node

    def _atom(self, kind: str, label: str) -> Basic:
        if kind not in _OPERAND_STARTS:
            return Symbol("")
        self._left.pop()
        if kind == "open":
            items = self.parse()
            is_term = label in "({" and len(items) == 1 and isinstance(items[0], Expr)
            return items[0] if is_term else written(label + self._closed, *items)
        if kind == "root":
            return Pow(self._argument(), S.Half, evaluate=False)
        if kind == "fraction":
            return _join(["/"], [self._argument(), self._argument()])
        return Symbol(label)

    def _argument(self) -> Basic:
        kind, label = self._left[-1]
        if self._latex and len(label) > 1 and label[0].isdigit():
            self._left[-1] = kind, label[1:]
            return Symbol(label[0])
        return self._operand(scripted=False)


def _join(operators: list[str], operands: list[Basic]) -> Basic:
    """Join operands by operators of one binding strength, or put a sign before a single operand. The result is
    of SymPy's class for these operators if there is one, else :class:`Written`."""
    signed = [*zip(["", *operators][-len(operands) :], operands, strict=True)]
    if {*operators} <= {"*", "/"}:
        powers = (Pow(x, S.NegativeOne, evaluate=False) if sign == "/" else x for sign, x in signed)
        return Mul(*powers, evaluate=False)
    if {*operators} <= {"+", "-"}:
        terms = (Mul(S.NegativeOne, x, evaluate=False) if sign == "-" else x for sign, x in signed)
        return Add(*sorted(terms, key=cmp_to_key(Basic.compare)), evaluate=False)
    if len(operators) == 1 and operators[0] in _RELATIONS:
        return _RELATIONS[operators[0]](*operands, evaluate=False)
    return written(" ".join(operators), *operands)
