# SPDX-License-Identifier: Apache-2.0
"""How many references a page has, kept on the host for the shared ones only.

A *reference* is one entry that names the page: a position of a live request's
row that the request owns, or a position of a prefix-tree node. (A row entry
below ``cache_protected_len`` is the tree's reference, not a second one.) A page
that is absent here and not free has exactly one reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ReferenceCountError(AssertionError):
    """The books do not balance: a bug of ours, never bad input."""


class PageReferences:
    """Counts of pages with two or more references. Page ids are plain ints."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, page: int) -> bool:
        return page in self._counts

    @property
    def extra(self) -> int:
        """References beyond the first, summed over all pages."""
        return sum(self._counts.values()) - len(self._counts)

    def add(self, pages: Iterable[int]) -> None:
        """One more reference for every occurrence of a page in ``pages``."""
        counts = self._counts
        for page in pages:
            counts[page] = counts.get(page, 1) + 1

    def touches(self, pages: Sequence[int]) -> bool:
        """Whether any of ``pages`` is shared."""
        return not self._counts.keys().isdisjoint(pages)

    def drop(self, pages: Sequence[int]) -> list[int]:
        """Take one reference away per occurrence; return the pages left with none.

        One call may hold the same page several times (a row that names it
        twice): each occurrence counts, and the page comes back once its last
        reference is gone, in the order of those last occurrences.

        Raises:
            ReferenceCountError: a page occurs more often than it has references.
        """
        counts, gone, freed = self._counts, [], set()
        for page in pages:
            left = counts.get(page)
            if left is None:
                if page in freed:
                    raise ReferenceCountError(f"page {page} freed more often than it is referenced")
                freed.add(page)
                gone.append(page)
            elif left == 2:
                del counts[page]
            else:
                counts[page] = left - 1
        return gone

    def snapshot(self) -> dict[int, int]:
        """Copy of the counts, for checks."""
        return dict(self._counts)
