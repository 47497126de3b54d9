# SPDX-License-Identifier: Apache-2.0
"""Parses the formal content (mathematics, code) of steps into SymPy expressions, and compares those of two
steps, as in stage 1 of the ReasonCache paper. Text is never evaluated, and :class:`Limits` bounds the time.

SymPy and zss are imported on first use, because they take half a second to load and only the filter process
needs them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sympy import Basic, Tuple


class OverBound(Exception):
    """A step exceeds a bound. The argument is the bound's name in :class:`Limits`. Caught in this package."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one step. A step that exceeds one of the first three bounds never matches another step."""

    max_chars: int = 8192  # of the decoded step
    max_depth: int = 32  # of nested brackets, arguments and signs; limits the depth of recursion
    max_nodes: int = 1024  # the parser's tokens in the step, which are not the model's tokens
    max_edit_nodes: int = 32  # SymPy nodes; for larger steps no edit distance is computed


LIMITS = Limits()


class Signature(NamedTuple):
    """Formal content of one step.

    ``content``: the step's expressions in the order of the text; None for prose, or if a bound is exceeded.
    ``bound``: the field of :class:`Limits` that the step exceeds, or empty.
    """

    content: Tuple | None = None
    bound: str = ""


def signature(text: str, limits: Limits = LIMITS, *, in_code: bool = False) -> Signature:
    """Parse the formal content of a decoded step. Never raises, whatever the text, and never executes text.

    ``in_code``: the step begins inside a code fence.
    """
    from sglang_reasoncache.filter.structure.expression import read

    try:
        return Signature(read(text, limits, in_code))
    except OverBound as over:
        return Signature(bound=over.args[0])


def same_structure(a: Signature, b: Signature, tolerance: int = 0, limits: Limits = LIMITS) -> bool:
    """Whether two steps pass the structure check (ReasonCache paper, stage 1, item 4).

    A step that exceeds a bound never passes. Otherwise a step without formal content passes with every step.

    ``tolerance``: the largest allowed tree edit distance (Zhang and Shasha, unit costs). Trees of more than
    ``limits.max_edit_nodes`` nodes must be equal.
    """
    if a.bound or b.bound:
        return False
    if a.content is None or b.content is None:
        return True
    # Hashes are compared first, because SymPy stores them and different content usually has different hashes.
    if hash(a.content) == hash(b.content) and a.content == b.content:
        return True
    return tolerance > 0 and _is_near(a.content, b.content, tolerance, limits.max_edit_nodes)


def _is_near(a: Basic, b: Basic, tolerance: int, max_nodes: int) -> bool:
    import zss
    from sympy import preorder_traversal

    first, second = (
        Counter(map(_label, itertools.islice(preorder_traversal(tree), max_nodes + 1)))
        for tree in (a, b)
    )
    # Each edit operation changes at most one label, so at least ``least`` operations are needed.
    least = max((first - second).total(), (second - first).total())
    if least > tolerance or max(first.total(), second.total()) > max_nodes:
        return False
    costs = (lambda _: 1, lambda _: 1, lambda x, y: int(_label(x) != _label(y)))
    return bool(zss.distance(a, b, lambda node: node.args, *costs) <= tolerance)


def _label(node: Basic) -> object:
    return node.func if node.args else node
