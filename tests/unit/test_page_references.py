# SPDX-License-Identifier: Apache-2.0
"""Tests ``PageReferences`` against a plain ``Counter`` of every page's references."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.cache.references import PageReferences, ReferenceCountError

PAGES = range(1, 5)
SOME = st.lists(st.sampled_from(PAGES), max_size=6)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(SOME, SOME), max_size=8))
def test_references_are_those_of_a_counter(changes: list[tuple[list[int], list[int]]]) -> None:
    """A page that lost its last reference is allocated again at once, so every page has one at least."""
    references = PageReferences()
    held = Counter(PAGES)
    for gained, lost in changes:
        before = dict(references), references.extra
        after = Counter(held)
        after.update(gained)
        after.subtract(lost)
        if min(after.values()) < 0:
            with pytest.raises(ReferenceCountError, match=r"page \d freed more often"):
                references.changed(gained, lost)
            assert (dict(references), references.extra) == before
            continue
        counts, freed = references.changed(gained, lost)
        assert (dict(references), references.extra) == before, "nothing changes yet"
        assert counts == {page: after[page] for page in {*gained, *lost}}
        last = {page: at for at, page in enumerate(lost)}
        gone = [page for page in sorted(last, key=last.__getitem__) if after[page] == 0]
        assert freed == gone
        references.set(counts)
        held = Counter({page: after[page] or 1 for page in PAGES})
        assert references == {page: count for page, count in held.items() if count > 1}
        assert references.extra == held.total() - len(PAGES)


def test_a_page_that_is_gained_and_lost_in_one_change_is_kept() -> None:
    """What a row gains is counted before what it loses: a page that moves within a row is never freed."""
    references = PageReferences()
    counts, freed = references.changed(gained=[3], lost=[3, 4])
    assert (counts, freed) == ({3: 1, 4: 0}, [4])
    references.set(counts)
    assert references == {} and references.extra == 0
