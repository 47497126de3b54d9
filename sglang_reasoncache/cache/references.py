# SPDX-License-Identifier: Apache-2.0
"""Reference counts of shared pages, in host memory."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch


class ReferenceCountError(AssertionError):
    """A page was freed more often than it is referenced: a bug of the plugin, never bad input."""


class PageReferences(dict[int, int]):
    """Page id -> number of references, in host memory, for pages with two or more. Other used pages have one.

    A *reference* is one use of the page by a tree node, or by a live row in the part that the request owns
    (positions from ``cache_protected_len`` on).

    Attributes:
        extra: Total number of references beyond the first one of each page.
    """

    extra = 0

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

    def set(self, counts: Mapping[int, int]) -> None:
        for page, count in counts.items():
            self.extra += max(count, 1) - self.get(page, 1)
            if count > 1:
                self[page] = count
            else:
                self.pop(page, None)


class Change(NamedTuple):
    """New reference counts that are not set yet. ``counts``: page id -> new number of references; ``freed``:
    ids of pages to free, int64 ``[pages]`` on the pool's device."""

    counts: dict[int, int]
    freed: torch.Tensor
