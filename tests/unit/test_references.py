# SPDX-License-Identifier: Apache-2.0
"""Reference counts of shared pages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reasoncache.cache.allocator import PageReferences, ReferenceCountError

_PAGES = st.lists(st.integers(1, 4), max_size=6)


@given(st.lists(st.tuples(st.booleans(), _PAGES), max_size=12))
def test_counts_are_those_of_a_plain_dict(calls: list[tuple[bool, list[int]]]) -> None:
    """Every occurrence counts; pages come back in the order of their last references.

    A page with one reference is not in the books. A call that takes more than there are raises.
    """
    references, counts = PageReferences(), dict.fromkeys(range(1, 5), 1)
    for adds, pages in calls:
        if adds:
            references.add(pages)
            for page in pages:
                counts[page] += 1
        elif all(pages.count(page) <= counts[page] for page in pages):
            gone = []
            for page in pages:
                counts[page] -= 1
                gone += [page] * (counts[page] == 0)
            assert references.drop(pages) == gone
            # They are handed out again.
            counts |= dict.fromkeys(gone, 1)
        else:
            with pytest.raises(ReferenceCountError, match="page [1-4] freed more often"):
                references.drop(pages)
            return
        shared = {page: count for page, count in counts.items() if count > 1}
        assert references == shared
        assert len(references) == len(shared)
        assert [page for page in counts if page in references] == list(shared)
