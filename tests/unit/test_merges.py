# SPDX-License-Identifier: Apache-2.0
"""Tests ``Merges`` against a plain list of labels: positions with equal labels are in one set."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.sharing.merges import Key, Merges

COUNT = 12
ROWS = 3
PAIRS = st.lists(st.tuples(st.integers(0, COUNT - 1), st.integers(0, COUNT - 1)), max_size=3)
#: Blocks, as pairs of a position and the position at the same place in the source, and rows that are freed.
STEPS = st.lists(PAIRS | st.integers(0, ROWS - 1), max_size=10)


def _key(at: int) -> Key:
    """Positions belong to the rows in turns."""
    return at % ROWS, at


def _joined(labels: list[int], block: list[tuple[int, int]]) -> list[int] | None:
    """The labels after joining the block's pairs one by one, or None if a pair is in one set already."""
    for dst, src in block:
        low = labels[dst]
        high = labels[src]
        if low == high:
            return None
        labels = [high if label == low else label for label in labels]
    return labels


@settings(max_examples=600, deadline=None)
@given(STEPS)
def test_sets_are_those_of_relabelling(steps: list[list[tuple[int, int]] | int]) -> None:
    merges = Merges()
    labels = list(range(COUNT))
    fresh = itertools.count(COUNT)
    for step in steps:
        if isinstance(step, int):
            merges.remove(step)
            for at in range(step, COUNT, ROWS):
                labels[at] = next(fresh)
        else:
            readers = [_key(dst) for dst, _ in step]
            sources = [_key(src) for _, src in step]
            after = _joined(labels, step)
            assert merges.would_repeat(readers, sources) == (after is None)
            if after is not None:
                merges.join(readers, sources)
                labels = after
        for at, label in enumerate(labels):
            same = [other for other, others in enumerate(labels) if others == label]
            assert merges.size(_key(at)) == len(same)
            assert merges.is_across(_key(at)) == (len({other % ROWS for other in same}) > 1)


def test_a_question_changes_nothing() -> None:
    merges = Merges()
    assert not merges.would_repeat([(0, 8), (0, 9)], [(0, 16), (0, 17)])
    assert merges.size((0, 8)) == 1
    merges.join([(0, 8), (0, 9)], [(0, 16), (0, 17)])
    assert merges.would_repeat([(0, 0), (0, 9)], [(0, 8), (0, 17)])
    assert merges.size((0, 0)) == 1 and merges.size((0, 8)) == merges.size((0, 17)) == 2


def test_the_size_counts_what_was_lent_to_a_freed_row() -> None:
    """Two positions read a slot of a third row. When that row is freed, they still read one slot."""
    merges = Merges()
    merges.join([(1, 4)], [(0, 4)])
    merges.join([(2, 4)], [(0, 4)])
    merges.remove(0)
    assert merges.size((1, 4)) == merges.size((2, 4)) == 2 and merges.is_across((1, 4))
    assert merges.size((0, 4)) == 1
