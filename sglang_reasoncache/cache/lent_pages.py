# SPDX-License-Identifier: Apache-2.0
"""Counts the pages that several owners name: continuations, and rows of requests that run.

Responses to one prompt read each other's slots. When such a response finishes and becomes a continuation, other
rows, or other continuations, name some of its pages. Evicting the continuation frees such a page only if nobody
else names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto


class Holder(Enum):
    """Who keeps a page of a continuation from being free."""

    #: A running request reads a continuation that names it.
    PINNED = auto()
    #: The row of a running request names it.
    ROW = auto()
    #: Only continuations that nobody reads: evicting all of them frees it.
    NOBODY = auto()


class _Page:
    """``references``: see :class:`PageReferences`. ``entries``: how many of these are positions of
    continuations; ``pinned``: how many of these are positions of continuations that running requests read."""

    def __init__(self, references: int) -> None:
        self.references = references
        self.entries = 0
        self.pinned = 0

    @property
    def holder(self) -> Holder:
        if self.pinned:
            return Holder.PINNED
        return Holder.ROW if self.references > self.entries else Holder.NOBODY


class LentPages:
    """The pages of continuations that others name, or named.

    Attributes:
        held: How many of the pages each :class:`Holder` keeps.
    """

    def __init__(self) -> None:
        self.held = dict.fromkeys(Holder, 0)
        self._pages: dict[int, _Page] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._pages)

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def add(self, pages: Iterable[int], references: Mapping[int, int], pinned: bool) -> None:
        """A continuation names ``pages``, once for each occurrence. ``references``: page -> number of
        references, if it is not 1. ``pinned``: whether a running request reads it."""
        for number in pages:
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = _Page(references.get(number, 1))
            else:
                self.held[page.holder] -= 1
            page.entries += 1
            page.pinned += pinned
            self.held[page.holder] += 1

    def remove(self, pages: Iterable[int], pinned: bool = False) -> None:
        """A continuation no longer names ``pages``. Its references are taken away next."""
        for number in pages:
            page = self._pages[number]
            self.held[page.holder] -= 1
            page.entries -= 1
            page.pinned -= pinned
            if page.entries:
                self.held[page.holder] += 1
            else:
                del self._pages[number]

    def pin(self, pages: Iterable[int], yes: bool) -> None:
        """Running requests begin to read a continuation that names ``pages``, or no longer do so."""
        for number in pages:
            page = self._pages[number]
            self.held[page.holder] -= 1
            page.pinned += 1 if yes else -1
            self.held[page.holder] += 1

    def recount(self, counts: Mapping[int, int]) -> None:
        """The numbers of references of some pages have changed. ``counts``: page -> new number."""
        if not self._pages:
            return
        for number, references in counts.items():
            page = self._pages.get(number)
            if page is not None:
                self.held[page.holder] -= 1
                page.references = references
                self.held[page.holder] += 1
