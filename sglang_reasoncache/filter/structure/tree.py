# SPDX-License-Identifier: Apache-2.0
"""Labelled ordered trees, their bounds, their canonical hash and their edit distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import cast

from sglang_reasoncache.arguments import flag_of

# (label, children). Plain tuples: built by the hundred for every formal step,
# compared and hashed by the interpreter's own code.
Tree = tuple[str, tuple["Tree", ...]]


class OverBound(Exception):
    """A step exceeds a field of :class:`Limits`, its only argument. Never leaves the package."""


@dataclass(frozen=True)
class Limits:
    """How much of a step is read. One over a bound matches nothing: nobody has compared it."""

    max_chars: int = 8192  # of the decoded step
    #: Nesting of brackets, arguments, prefixes and indentation; at most 128: the parser recurses.
    max_depth: int = 64
    max_nodes: int = 1024  # lexical tokens, hence tree nodes, of all trees together
    #: Of either step when a tree edit distance is computed: its cost grows faster than the product.
    max_edit_nodes: int = 32


def leaf(label: str) -> Tree:
    return label, ()


def preorder(trees: Iterable[Tree]) -> Iterator[Tree]:
    """All nodes. Keeps its own stack: depth costs no recursion."""
    stack = [*trees][::-1]
    while stack:
        tree = stack.pop()
        yield tree
        stack.extend(tree[1][::-1])


def serialise(trees: Iterable[Tree]) -> bytes:
    """Preorder of (number of children, label length in characters, label), UTF-8: equal bytes
    mean equal trees."""
    parts = [f"{len(children)},{len(label)}:{label}" for label, children in preorder(trees)]
    # surrogatepass: decoded text may hold lone surrogates, and must not raise.
    return "".join(parts).encode("utf-8", "surrogatepass")


def digest(trees: Iterable[Tree]) -> bytes:
    """Canonical hash, 16 bytes; equal ones mean equal trees but for collisions of blake2b."""
    return blake2b(serialise(trees), digest_size=16).digest()


def label_distance(a: Sequence[Tree], b: Sequence[Tree]) -> int:
    """Lower bound of the edit distance: one operation changes at most one label."""
    one, other = (Counter(label for label, _ in preorder(trees)) for trees in (a, b))
    return max((one - other).total(), (other - one).total())


def edit_distance(a: Sequence[Tree], b: Sequence[Tree]) -> int:
    """Tree edit distance with unit costs (Zhang and Shasha, package ``zss``) of two sequences,
    each joined under one root. The caller bounds the sizes."""
    # Not zss.simple_distance: it charges nothing for the empty label.
    found = require_zss()(
        ("", tuple(a)),
        ("", tuple(b)),
        get_children=lambda tree: tree[1],
        insert_cost=lambda _: 1,
        remove_cost=lambda _: 1,
        update_cost=lambda one, other: int(one[0] != other[0]),
    )
    return int(found)


def require_zss() -> Callable[..., float]:
    """The distance function of ``zss``, imported on first use; RuntimeError without it."""
    try:
        from zss import distance
    except ImportError as error:
        raise RuntimeError(
            f"{flag_of('structure_tolerance')} above 0 needs the package zss: pip install zss"
        ) from error
    return cast("Callable[..., float]", distance)
