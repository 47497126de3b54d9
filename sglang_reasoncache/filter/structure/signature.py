# SPDX-License-Identifier: Apache-2.0
"""The structure signature of a step, and the comparison of two. Imports SymPy and zss on first use:
of all processes of a server only the filter's needs them, and half a second to load them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from sglang_reasoncache.filter.structure import Limits, OverBound

if TYPE_CHECKING:
    from sympy import Basic, Tuple

LIMITS = Limits()


class Signature(NamedTuple):
    """Formal content of one step: its expressions in their order, None for prose and over a bound;
    the field of :class:`Limits` that the step exceeds, or empty."""

    content: Tuple | None = None
    bound: str = ""


def signature(text: str, limits: Limits = LIMITS, *, in_code: bool = False) -> Signature:
    """Read the formal content of a decoded step. Any text is read; nothing in it raises or runs.

    ``in_code``: the step begins inside a code fence.
    """
    from sglang_reasoncache.filter.structure.expression import read

    try:
        return Signature(read(text, limits, in_code))
    except OverBound as over:
        return Signature(bound=over.args[0])


def same_structure(a: Signature, b: Signature, tolerance: int = 0, limits: Limits = LIMITS) -> bool:
    """Whether two steps pass the structure check (ReasonCache, stage 1, item 4).

    Prose passes with every step but one over a bound, which passes with none. ``tolerance``: the
    largest tree edit distance allowed (Zhang and Shasha, unit costs), for trees within
    ``limits.max_edit_nodes``; larger ones must be equal.
    """
    if a.bound or b.bound:
        return False
    if a.content is None or b.content is None:
        return True
    # SymPy keeps hashes; different content mostly has different ones.
    if hash(a.content) == hash(b.content) and a.content == b.content:
        return True
    return tolerance > 0 and _is_near(a.content, b.content, tolerance, limits.max_edit_nodes)


def _is_near(a: Basic, b: Basic, tolerance: int, max_nodes: int) -> bool:
    import zss
    from sympy import preorder_traversal

    one, other = (Counter(map(_label, preorder_traversal(tree))) for tree in (a, b))
    # One operation changes at most one label.
    least = max((one - other).total(), (other - one).total())
    if least > tolerance or max(one.total(), other.total()) > max_nodes:
        return False
    costs = (lambda _: 1, lambda _: 1, lambda x, y: int(_label(x) != _label(y)))
    return bool(zss.distance(a, b, lambda node: node.args, *costs) <= tolerance)


def _label(node: Basic) -> object:
    return node.func if node.args else node
