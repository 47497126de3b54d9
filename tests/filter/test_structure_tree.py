# SPDX-License-Identifier: Apache-2.0
"""Canonical hash and tree edit distance against slow, obvious references."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.structure import Limits, Tree, same_structure, signature
from sglang_reasoncache.filter.structure.tree import (
    digest,
    edit_distance,
    label_distance,
    labels,
    leaf,
    serialise,
)

_LABELS = st.sampled_from(["a", "b", "", "1,1:a", "0,", "é"])
_TREES = st.recursive(
    _LABELS.map(leaf),
    lambda inner: st.tuples(_LABELS, st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)
_FORESTS = st.lists(_TREES, max_size=3).map(tuple)


@settings(deadline=None)
@given(_FORESTS, _FORESTS)
def test_digests_are_equal_only_for_equal_trees(a: tuple[Tree, ...], b: tuple[Tree, ...]) -> None:
    """Labels that imitate the serialisation do not confuse it."""
    assert (digest(a) == digest(b)) == (serialise(a) == serialise(b)) == (a == b)


def test_a_serialisation_in_full() -> None:
    """The format is fixed."""
    assert serialise((("=", (leaf("é"), leaf(""))), leaf("10"))) == "2,1:=0,1:é0,0:0,2:10".encode()


def slow_labels(forest: tuple[Tree, ...]) -> list[str]:
    return [name for label, children in forest for name in (label, *slow_labels(children))]


@cache
def slow_distance(a: tuple[Tree, ...], b: tuple[Tree, ...]) -> int:
    """Forest edit distance by its recursive definition, on the rightmost roots."""
    if not a or not b:
        return len(slow_labels(a)) + len(slow_labels(b))
    (label_a, children_a), (label_b, children_b) = a[-1], b[-1]
    return min(
        slow_distance((*a[:-1], *children_a), b) + 1,
        slow_distance(a, (*b[:-1], *children_b)) + 1,
        slow_distance(a[:-1], b[:-1])
        + slow_distance(children_a, children_b)
        + (label_a != label_b),
    )


@settings(deadline=None)
@given(_FORESTS, _FORESTS)
def test_edit_distance(a: tuple[Tree, ...], b: tuple[Tree, ...]) -> None:
    assert labels(a) == slow_labels(a)
    distance = edit_distance(a, b)
    assert distance == slow_distance(a, b)
    assert label_distance(labels(a), labels(b)) <= distance


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        ("2x+5=10", "2x-5=10", 1),
        ("x = 1", "x = 1 and y", 1),
        ("x = 1", "x = 12 and y", 2),
        ("x + 1", "y - 2", 3),
        ("(x + 1)^2", "x + 1", 2),
    ],
)
def test_tolerance(a: str, b: str, distance: int) -> None:
    """Hand-counted operations: allowed at that tolerance, not one below."""
    first, second = signature(a, keep_trees=True), signature(b, keep_trees=True)
    assert same_structure(first, second, tolerance=distance)
    assert not same_structure(first, second, tolerance=distance - 1)


def test_trees_over_the_edit_bound_match_only_if_equal() -> None:
    text = "x = " + " + ".join(str(i) for i in range(40))
    other = text.replace("x", "y")
    limits = Limits(max_edit_nodes=43)
    first = signature(text, limits, keep_trees=True)
    assert same_structure(first, signature(other, limits, keep_trees=True), 1, limits)
    tight = Limits(max_edit_nodes=42)
    assert not same_structure(first, signature(other, tight, keep_trees=True), 1, tight)
    assert same_structure(first, signature(text, tight, keep_trees=True), 1, tight)


def test_tolerance_without_trees_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_trees"):
        same_structure(signature("x = 1"), signature("x = 2"), tolerance=1)
