# SPDX-License-Identifier: Apache-2.0
"""Reference counts of shared pages, in host memory."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.host_row import UNKNOWN, HostRow


class ReferenceCountError(AssertionError):
    """A page was freed more often than it is referenced: a bug of the plugin, never bad input."""


class PageReferences(dict[int, int]):
    """Page id -> number of references, in host memory, for pages with two or more. Other used pages have one.

    A *holder* is a page of a tree node's positions, or of a live row's in the part that the request owns
    (positions from ``cache_protected_len`` on). It has a *reference* to each page of which it names a slot: to
    one page, unless its positions were redirected to slots in several. At page size 1 holder and page are one
    position and one slot.

    Attributes:
        extra: Total number of references beyond the first one of each page.
        several: Total number of references beyond the first one of each holder.
    """

    extra = 0
    several = 0

    @property
    def saved(self) -> int:
        """Number of holders, minus the number of pages that they name."""
        return self.extra - self.several

    def changed(
        self, gained: Iterable[int], lost: Iterable[int]
    ) -> tuple[dict[int, int], list[int]]:
        """Compute new counts: each occurrence in ``gained`` adds a reference, then each occurrence in
        ``lost`` takes one away. Nothing changes yet.

        Returns the new counts of these pages, and the pages that have no reference left, in the order
        in which they lost their last reference. Raises ReferenceCountError if a count falls below 0.
        """
        counts: dict[int, int] = {}
        for page in gained:
            counts[page] = counts.get(page, self.get(page, 1)) + 1
        freed = []
        for page in lost:
            counts[page] = left = counts.get(page, self.get(page, 1)) - 1
            if left < 0:
                raise ReferenceCountError(f"page {page} freed more often than it is referenced")
            if left == 0:
                freed.append(page)
        return counts, freed

    def set(self, counts: Mapping[int, int], several: int = 0) -> None:
        """Set new counts. ``several``: by how much :attr:`several` grows."""
        self.several += several
        for page, count in counts.items():
            self.extra += max(count, 1) - self.get(page, 1)
            if count > 1:
                self[page] = count
            else:
                self.pop(page, None)


class Change(NamedTuple):
    """New reference counts that are not set yet.

    Attributes:
        counts: Page id -> new number of references.
        freed: Ids of pages to free, int64 ``[pages]`` on the pool's device.
        several: See :meth:`PageReferences.set`.
    """

    counts: dict[int, int]
    freed: torch.Tensor
    several: int = 0


def named_pages(known: np.ndarray, page: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What consecutive entries of a row or node name, as the host knows it.

    Args:
        known: For each entry its slot, ``EVICTED``, or ``UNKNOWN``: int64 ``[entries]``. Pages are evicted as a
            whole. Unless no entry of a page of entries is known, all that were redirected are.
        page: Tokens per page. The first entry begins a page, the last page of entries may be incomplete.

    Returns the references of these entries: the number of the page of entries, from 0 on, and the page that
    it names, both int64 ``[references]``. Then the numbers of the pages of entries of which no entry is known:
    each names a single page, which nobody else names.
    """
    size = -(-len(known) // page)
    entries = np.zeros((size, page), dtype=np.int64)
    entries.reshape(-1)[: len(known)] = known
    # A reference is a page of entries and the page that it names, here as one number.
    base = int(entries.max(initial=0)) // page + 1
    references = (np.arange(size)[:, None] * base + entries // page)[entries > UNKNOWN]
    references = np.unique(references) if page > 1 else references
    return references // base, references % base, np.flatnonzero(~entries.any(axis=1))


def moved_references(
    row: HostRow, old: Mapping[int, int], page: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which references a row lost and gained when positions of it were redirected. ``old``: these positions,
    and the slot that each named before. Returns the references' pages: two int64 ``[references]``."""
    positions, slots = (np.fromiter(each, np.int64, len(old)) for each in (old, old.values()))
    numbers, at = np.unique(positions // page, return_inverse=True)
    now = row.at((numbers[:, None] * page + np.arange(page)).reshape(-1)).reshape(-1, page)
    before = now.copy()
    before[at, positions % page] = slots
    # A reference is a page of positions and the page that it names, here as one number.
    base = int(max(now.max(initial=0), before.max(initial=0))) // page + 1
    first = np.arange(len(numbers))[:, None] * base
    had, has = (np.unique(first + entries // page) for entries in (before, now))
    lost = np.setdiff1d(had, has, assume_unique=True)
    gained = np.setdiff1d(has, had, assume_unique=True)
    return lost % base, gained % base
