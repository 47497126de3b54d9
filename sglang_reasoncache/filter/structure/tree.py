# SPDX-License-Identifier: Apache-2.0
"""Labelled ordered trees, their canonical hash and their edit distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import cast

# (label, children). Plain tuples: built by the hundred for every formal step,
# compared and hashed by the interpreter's own code.
Tree = tuple[str, tuple["Tree", ...]]

_DIGEST_BYTES = 16


def leaf(label: str) -> Tree:
    return label, ()


def _preorder(trees: Iterable[Tree]) -> Iterator[Tree]:
    """All nodes. Keeps its own stack: depth costs no recursion."""
    stack = [*trees][::-1]
    while stack:
        tree = stack.pop()
        yield tree
        stack.extend(tree[1][::-1])


def labels(trees: Iterable[Tree]) -> list[str]:
    """All labels in preorder."""
    return [label for label, _ in _preorder(trees)]


def serialise(trees: Iterable[Tree]) -> bytes:
    """One spelling for every sequence of trees: equal bytes mean equal trees.

    Preorder of (number of children, label length in characters, label), UTF-8.
    """
    parts = [f"{len(children)},{len(label)}:{label}" for label, children in _preorder(trees)]
    # surrogatepass: decoded text may hold lone surrogates, and must not raise.
    return "".join(parts).encode("utf-8", "surrogatepass")


def digest(trees: Iterable[Tree]) -> bytes:
    """Canonical hash; equal ones mean equal trees but for collisions of blake2b."""
    return blake2b(serialise(trees), digest_size=_DIGEST_BYTES).digest()


def label_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Lower bound of the tree edit distance from the labels alone.

    One operation with unit cost changes at most one label, so the distance is at least the
    size of the larger multiset minus the common part.
    """
    return max(len(a), len(b)) - (Counter(a) & Counter(b)).total()


def edit_distance(a: Sequence[Tree], b: Sequence[Tree]) -> int:
    """Tree edit distance with unit costs (Zhang and Shasha, package ``zss``).

    Each sequence is joined under one root. The caller bounds the sizes.

    Raises:
        RuntimeError: ``zss`` is not installed.
    """
    return int(
        # Not zss.simple_distance: it takes the empty label for a missing node
        # and charges nothing for it.
        require_zss()(
            ("", tuple(a)),
            ("", tuple(b)),
            get_children=lambda tree: tree[1],
            insert_cost=lambda _: 1,
            remove_cost=lambda _: 1,
            update_cost=lambda one, other: int(one[0] != other[0]),
        )
    )


def require_zss() -> Callable[..., float]:
    """The distance function of ``zss``, imported on first use.

    Raises:
        RuntimeError: ``zss`` is not installed.
    """
    try:
        from zss import distance
    except ImportError as error:
        raise RuntimeError(
            "--reasoncache-structure-tolerance above 0 needs the package zss: pip install zss"
        ) from error
    return cast("Callable[..., float]", distance)
