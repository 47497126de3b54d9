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


class PageReferences(dict[int, int]):
    """Counts of pages with two or more references, by page id."""

    def add(self, pages: Iterable[int]) -> None:
        """One more reference for every occurrence of a page in ``pages``."""
        for page in pages:
            self[page] = self.get(page, 1) + 1

    def touches(self, pages: Sequence[int]) -> bool:
        """Whether any of ``pages`` is shared."""
        return not self.keys().isdisjoint(pages)

    def drop(self, pages: Sequence[int]) -> list[int]:
        """Take one reference away per occurrence; return the pages left with none.

        Returned in the order of their last occurrences: a row may name a page twice.

        Raises:
            ReferenceCountError: a page occurs more often than it has references.
        """
        freed: dict[int, None] = {}
        for page in pages:
            left = self.get(page)
            if left is None:
                if page in freed:
                    raise ReferenceCountError(f"page {page} freed more often than it is referenced")
                freed[page] = None
            elif left == 2:
                del self[page]
            else:
                self[page] = left - 1
        return list(freed)
