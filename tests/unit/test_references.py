# SPDX-License-Identifier: Apache-2.0
"""Reference counts of shared pages."""

from __future__ import annotations

import pytest

from sglang_reasoncache.cache.references import PageReferences, ReferenceCountError


@pytest.fixture
def references() -> PageReferences:
    return PageReferences()


def test_page_that_nobody_shares_has_one_reference(references: PageReferences) -> None:
    assert 7 not in references
    assert len(references) == 0


def test_add_counts_every_occurrence(references: PageReferences) -> None:
    references.add([3, 5, 3])
    assert references == {3: 3, 5: 2}
    assert 3 in references


def test_evict_returns_pages_in_the_order_of_their_last_reference(
    references: PageReferences,
) -> None:
    references.add([3])
    assert references.drop([3, 9, 4]) == [9, 4]
    assert references.drop([8, 3]) == [8, 3]


def test_evict_counts_every_occurrence_in_one_call(references: PageReferences) -> None:
    """A row that names a page twice gives both references back at once."""
    references.add([3, 3])
    assert references.drop([3, 3]) == []
    assert references == {}
    references.add([3])
    assert references.drop([3, 3]) == [3]
    assert len(references) == 0


def test_page_that_lost_all_but_one_reference_is_forgotten(references: PageReferences) -> None:
    references.add([3, 6])
    references.drop([3])
    assert references == {6: 2}
    assert not references.touches([3, 1])
    assert references.touches([1, 6])


@pytest.mark.parametrize(("added", "dropped"), [([], [2, 2]), ([2], [2, 2, 2]), ([2], [2, 5, 5])])
def test_evict_beyond_the_last_reference_raises(
    references: PageReferences, added: list[int], dropped: list[int]
) -> None:
    references.add(added)
    with pytest.raises(ReferenceCountError, match="page [25] freed more often"):
        references.drop(dropped)


def test_nothing_evicted_is_nothing_freed(references: PageReferences) -> None:
    references.add([1])
    assert references.drop([]) == []
    assert references == {1: 2}
