# SPDX-License-Identifier: Apache-2.0
"""Labelled ordered trees, their canonical hash and their edit distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import cast

# (label, children). Plain tuples: built by the hundred for every formal step,
# compared and hashed by the interpreter's own code.
Tree = tuple[str, tuple["Tree", ...]]

DIGEST_BYTES = 16


def leaf(label: str) -> Tree:
    return label, ()


def labels(trees: Iterable[Tree]) -> list[str]:
    """All labels in preorder. Keeps its own stack: depth costs no recursion."""
    found: list[str] = []
    stack = list(trees)
    stack.reverse()
    while stack:
        label, children = stack.pop()
        found.append(label)
        stack.extend(reversed(children))
    return found


def serialise(trees: Iterable[Tree]) -> bytes:
    """One spelling for every sequence of trees: equal bytes mean equal trees.

    Preorder of (number of children, label length in characters, label), UTF-8.
    """
    parts: list[str] = []
    stack = list(trees)
    stack.reverse()
    while stack:
        label, children = stack.pop()
        parts.append(f"{len(children)},{len(label)}:{label}")
        if children:
            stack.extend(reversed(children))
    # surrogatepass: decoded text may hold lone surrogates, and must not raise.
    return "".join(parts).encode("utf-8", "surrogatepass")


def digest(trees: Iterable[Tree]) -> bytes:
    """Canonical hash of a sequence of trees, ``DIGEST_BYTES`` bytes.

    Equal digests mean equal trees but for collisions of blake2b.
    """
    return blake2b(serialise(trees), digest_size=DIGEST_BYTES).digest()


def label_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Lower bound of the tree edit distance from the labels alone.

    One operation with unit cost changes at most one label, so the distance is
    at least the size of the larger multiset minus the common part.
    """
    common = (Counter(a) & Counter(b)).total()
    return max(len(a), len(b)) - common


def edit_distance(a: Sequence[Tree], b: Sequence[Tree]) -> int:
    """Tree edit distance with unit costs (Zhang and Shasha, package ``zss``).

    Each sequence is joined under one root. The caller bounds the sizes.

    Raises:
        RuntimeError: ``zss`` is not installed.
    """
    zss_distance = require_zss()
    return int(
        # Not zss.simple_distance: it takes the empty label for a missing node
        # and charges nothing for it.
        zss_distance(
            ("", tuple(a)),
            ("", tuple(b)),
            get_children=_children,
            insert_cost=_unit_cost,
            remove_cost=_unit_cost,
            update_cost=_update_cost,
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


def _children(tree: Tree) -> tuple[Tree, ...]:
    return tree[1]


def _unit_cost(_: Tree) -> int:
    return 1


def _update_cost(a: Tree, b: Tree) -> int:
    return int(a[0] != b[0])
