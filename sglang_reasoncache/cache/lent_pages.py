# SPDX-License-Identifier: Apache-2.0
"""Counts the pages that several owners name: continuations, and rows of requests that run.

Responses to one prompt read each other's slots. When such a response finishes and becomes a continuation, other
rows, or other continuations, name some of its pages. Evicting the continuation frees such a page only if nobody
else names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto

import numpy as np


class Holder(Enum):
    """Who keeps a page of a continuation from being free."""

    #: A running request reads a continuation that names it.
    PINNED = auto()
    #: The row of a running request names it.
    ROW = auto()
    #: Only continuations that nobody reads: evicting all of them frees it.
    NOBODY = auto()


class LentPages:
    """The pages of continuations that others name, or named.

    Attributes:
        held: How many of the pages each :class:`Holder` keeps.
    """

    def __init__(self) -> None:
        self.held = dict.fromkeys(Holder, 0)
        # For each page, int32 ``[pages]``: its references (:class:`PageReferences`); how many of these are
        # entries of continuations, 0 if the page is not here; how many of these are entries of continuations
        # that running requests read.
        self._references, self._entries, self._pinned = np.zeros((3, 0), dtype=np.int32)

    def has(self, pages: np.ndarray) -> np.ndarray:
        """Which of ``pages``, int64 ``[n]``, are here: bool ``[n]``."""
        there = pages < len(self._entries)
        there[there] = self._entries[pages[there]] > 0
        return there

    def __len__(self) -> int:
        return sum(self.held.values())

    def add(self, pages: np.ndarray, references: Mapping[int, int]) -> None:
        """A continuation names ``pages``, int64 ``[n]``, once for each occurrence, and no running request reads
        them yet. ``references``: page -> number of references, if it is not 1."""
        if not len(pages):
            return
        pages, counts = _counted(pages)
        self._reserve(int(pages[-1]) + 1)
        new = pages[self._entries[pages] == 0]
        self._references[new] = [references.get(page, 1) for page in new.tolist()]
        with self._changing(pages):
            self._entries[pages] += counts

    def remove(self, pages: np.ndarray) -> None:
        """A continuation no longer names ``pages``, int64 ``[n]``, where nobody reads it. Its references are
        taken away next."""
        if not len(pages):
            return
        pages, counts = _counted(pages)
        with self._changing(pages):
            self._entries[pages] -= counts

    def pin(self, pages: np.ndarray, yes: bool) -> None:
        """Running requests begin to read the positions of a continuation that name ``pages``, int64 ``[n]``,
        or no longer do so."""
        if not len(pages):
            return  # SGLang locks what a waiting request matched at each attempt to admit it.
        pages, counts = _counted(pages)
        with self._changing(pages):
            self._pinned[pages] += counts if yes else -counts

    def recount(self, counts: Mapping[int, int]) -> None:
        """The numbers of references of some pages have changed. ``counts``: page -> new number."""
        if not len(self) or not counts:
            return
        pages = np.fromiter(counts, dtype=np.int64, count=len(counts))
        new = np.fromiter(counts.values(), dtype=np.int64, count=len(counts))
        there = self.has(pages)
        pages = pages[there]
        with self._changing(pages):
            self._references[pages] = new[there]

    def _reserve(self, size: int) -> None:
        missing = size - len(self._entries)
        if missing > 0:
            # Twice as much as before at least, so that all growth takes time proportional to the last size.
            more = np.zeros((3, max(missing, len(self._entries))), dtype=np.int32)
            both = np.concatenate(((self._references, self._entries, self._pinned), more), axis=1)
            self._references, self._entries, self._pinned = both

    @contextmanager
    def _changing(self, pages: np.ndarray) -> Iterator[None]:
        """Keep :attr:`held` right while ``pages``, without repeats, change."""
        self._tally(pages, -1)
        yield
        self._tally(pages, 1)

    def _tally(self, pages: np.ndarray, sign: int) -> None:
        entries = self._entries[pages]
        there = entries > 0
        pinned = there & (self._pinned[pages] > 0)
        of_rows = there & ~pinned & (self._references[pages] > entries)
        counts = [int(np.count_nonzero(each)) for each in (there, pinned, of_rows)]
        self.held[Holder.PINNED] += sign * counts[1]
        self.held[Holder.ROW] += sign * counts[2]
        self.held[Holder.NOBODY] += sign * (counts[0] - counts[1] - counts[2])


def _counted(pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of ``pages`` once, ascending, and how often it occurs: int64 and int32 ``[n]``."""
    once, counts = np.unique(pages, return_counts=True)
    return once, counts.astype(np.int32)
