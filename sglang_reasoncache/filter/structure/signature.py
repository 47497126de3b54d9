# SPDX-License-Identifier: Apache-2.0
"""The structure signature of a step and the comparison of two."""

from __future__ import annotations

from typing import NamedTuple

from sglang_reasoncache.filter.structure.code import code_tree
from sglang_reasoncache.filter.structure.expression import parse
from sglang_reasoncache.filter.structure.scan import regions
from sglang_reasoncache.filter.structure.tokens import parser_tokens
from sglang_reasoncache.filter.structure.tree import (
    Limits,
    OverBound,
    Tree,
    digest,
    edit_distance,
    label_distance,
    preorder,
)

_DEFAULT_LIMITS = Limits()


class Signature(NamedTuple):
    """Formal content of one step.

    Attributes:
        digest: canonical hash of the trees; empty for prose, and over a bound.
        trees: the trees, kept only where edit distances are wanted.
        bound: the field of :class:`Limits` exceeded. Such a step equals nothing, not even
            itself.
    """

    digest: bytes = b""
    trees: tuple[Tree, ...] = ()
    bound: str = ""


def signature(
    text: str,
    limits: Limits = _DEFAULT_LIMITS,
    *,
    in_code: bool = False,
    keep_trees: bool = False,
) -> Signature:
    """Read the formal content of a decoded step.

    Args:
        text: any text; nothing in it can raise or be run.
        limits: bounds of reading.
        in_code: the step begins inside a code fence.
        keep_trees: keep the trees for :func:`same_structure` with a tolerance.
    """
    try:
        trees = _trees(text, limits, in_code)
    except OverBound as over:
        return Signature(bound=over.args[0])
    return Signature(digest(trees), tuple(trees) if keep_trees else ()) if trees else Signature()


def _trees(text: str, limits: Limits, in_code: bool) -> list[Tree]:
    if len(text) > limits.max_chars:
        raise OverBound("max_chars")
    found: list[Tree] = []
    num_nodes = 0
    for kind, part in regions(text, in_code):
        if kind == "code":
            tree = code_tree(part, limits)
            if tree[1]:
                found.append(tree)
                num_nodes += _size((tree,))
        else:
            tokens = parser_tokens(part, limits, kind == "latex")
            num_nodes += len(tokens)
            found += parse(tokens, limits, kind == "latex")
        # Each part is below the bound on its own; so must be the whole.
        if num_nodes > limits.max_nodes:
            raise OverBound("max_nodes")
    return found


def _size(trees: tuple[Tree, ...]) -> int:
    return sum(1 for _ in preorder(trees))


def same_structure(
    a: Signature, b: Signature, tolerance: int = 0, limits: Limits = _DEFAULT_LIMITS
) -> bool:
    """Whether two steps pass the structure check (ReasonCache, stage 1, item 4).

    Prose passes with all but a step over a bound, which passes with nothing.

    Args:
        tolerance: largest tree edit distance allowed, in unit operations. At 0 the hashes
            decide; above, trees with more than ``limits.max_edit_nodes`` nodes match only if
            they are equal.

    Raises:
        ValueError: a tolerance above 0 with signatures made without trees.
        RuntimeError: a tolerance above 0 without the package ``zss``.
    """
    if a.bound or b.bound:
        return False
    if not a.digest or not b.digest or a.digest == b.digest:
        return True
    if tolerance <= 0:
        return False
    if not a.trees or not b.trees:
        raise ValueError("a structure tolerance above 0 needs signatures with keep_trees=True")
    if max(_size(a.trees), _size(b.trees)) > limits.max_edit_nodes:
        return False
    if label_distance(a.trees, b.trees) > tolerance:
        return False
    return edit_distance(a.trees, b.trees) <= tolerance
