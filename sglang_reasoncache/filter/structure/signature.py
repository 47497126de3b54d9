# SPDX-License-Identifier: Apache-2.0
"""The structure signature of a step and the comparison of two."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_reasoncache.filter.structure.code import code_tree
from sglang_reasoncache.filter.structure.emit import latex_tokens
from sglang_reasoncache.filter.structure.expression import parse
from sglang_reasoncache.filter.structure.formal import plain_tokens
from sglang_reasoncache.filter.structure.limits import Limits, OverBound
from sglang_reasoncache.filter.structure.scan import RegionKind, regions
from sglang_reasoncache.filter.structure.tree import (
    Tree,
    digest,
    edit_distance,
    label_distance,
    labels,
)


class SignatureKind(Enum):
    """What a step turned out to be."""

    PROSE = "prose"
    """Nothing formal: the structure check passes."""
    FORMAL = "formal"
    OVER_BOUND = "over_bound"
    """Too large to read: equals nothing, itself included."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Formal content of one step.

    Attributes:
        kind: see :class:`SignatureKind`.
        digest: canonical hash of the trees; empty unless FORMAL.
        trees: the trees, kept only where edit distances are wanted.
        bound: the field of :class:`Limits` exceeded; empty unless OVER_BOUND.
    """

    kind: SignatureKind
    digest: bytes = b""
    trees: tuple[Tree, ...] = ()
    bound: str = ""


_PROSE = Signature(SignatureKind.PROSE)
_DEFAULT_LIMITS = Limits()


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
        limits: bounds; a step over one of them is OVER_BOUND.
        in_code: the step begins inside a code fence.
        keep_trees: keep the trees for :func:`same_structure` with a tolerance.
    """
    try:
        trees = _trees(text, limits, in_code)
    except OverBound as over:
        return Signature(SignatureKind.OVER_BOUND, bound=over.bound)
    if not trees:
        return _PROSE
    return Signature(SignatureKind.FORMAL, digest(trees), tuple(trees) if keep_trees else ())


def _trees(text: str, limits: Limits, in_code: bool) -> list[Tree]:
    if len(text) > limits.max_chars:
        raise OverBound("max_chars")
    found: list[Tree] = []
    num_nodes = 0
    for kind, part in regions(text, in_code):
        if kind is RegionKind.CODE:
            tree = code_tree(part, limits)
            if tree[1]:
                found.append(tree)
                num_nodes += len(labels((tree,)))
        else:
            is_latex = kind is RegionKind.LATEX
            tokens = (latex_tokens if is_latex else plain_tokens)(part, limits)
            num_nodes += len(tokens)
            found += parse(tokens, limits, is_latex)
        # Each part is below the bound on its own; so must be the whole.
        if num_nodes > limits.max_nodes:
            raise OverBound("max_nodes")
    return found


def same_structure(
    a: Signature, b: Signature, tolerance: int = 0, limits: Limits = _DEFAULT_LIMITS
) -> bool:
    """Whether two steps pass the structure check (ReasonCache, stage 1, item 4).

    Checked only where both steps are formal; prose passes. A step over a bound passes with
    nothing.

    Args:
        tolerance: largest tree edit distance allowed, in unit operations. At 0 equality of the
            canonical hashes decides; above, trees with more than ``limits.max_edit_nodes``
            nodes match only if they are equal.

    Raises:
        ValueError: a tolerance above 0 with signatures made without trees.
        RuntimeError: a tolerance above 0 without the package ``zss``.
    """
    if SignatureKind.OVER_BOUND in (a.kind, b.kind):
        return False
    if SignatureKind.PROSE in (a.kind, b.kind) or a.digest == b.digest:
        return True
    if tolerance <= 0:
        return False
    if not a.trees or not b.trees:
        raise ValueError("a structure tolerance above 0 needs signatures with keep_trees=True")
    labels_a, labels_b = labels(a.trees), labels(b.trees)
    if max(len(labels_a), len(labels_b)) > limits.max_edit_nodes:
        return False
    if label_distance(labels_a, labels_b) > tolerance:
        return False
    return edit_distance(a.trees, b.trees) <= tolerance
