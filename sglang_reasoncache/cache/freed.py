# SPDX-License-Identifier: Apache-2.0
"""Tells the allocator what the host knows of entries that SGLang is freeing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from sglang_reasoncache.cache.host_row import HostRow

#: A row that shares no slots and has no evicted positions. Never changed.
NOTHING_SHARED = HostRow()


class FreedEntries:
    """SGLang hands freed slots to the allocator without the row that they come from. So the tree says here,
    while SGLang publishes or frees a row, which row that is. No row names a slot of an evicted node.

    ``has_window_pool``: whether sliding-window layers have a pool of their own.
    """

    def __init__(self, has_window_pool: bool) -> None:
        self._has_window_pool = has_window_pool
        self._row: HostRow | None = None
        self._inserted: torch.Tensor | None = None

    @property
    def has_row(self) -> bool:
        """Whether the tree said what is freed. Otherwise only the device knows which entries are shared."""
        return self._row is not None

    @contextmanager
    def of(self, row: HostRow) -> Iterator[None]:
        """A context in which SGLang frees entries of ``row``."""
        before = self._row
        self._row = row
        try:
            yield
        finally:
            self._row = before

    @contextmanager
    def inserting(self, slots: torch.Tensor) -> Iterator[None]:
        """A context in which SGLang inserts the entries ``slots`` of a row into the tree, and frees the slots
        of tokens that the tree already holds."""
        before = self._inserted
        self._inserted = slots
        try:
            yield
        finally:
            self._inserted = before

    @contextmanager
    def of_nodes(self) -> Iterator[None]:
        """A context in which SGLang frees evicted nodes, perhaps while it publishes or frees a row."""
        row = self._row
        inserted = self._inserted
        self._row = NOTHING_SHARED
        self._inserted = None
        try:
            yield
        finally:
            self._row = row
            self._inserted = inserted

    def known(self, slots: torch.Tensor, start: int) -> np.ndarray:
        """For each of ``slots``, which are entries of a row or node: the slot if it may be shared, ``EVICTED``,
        or 0 if the slot is not shared. Returns int64 ``[entries]``. ``start``: position of the first entry.

        Slots that are freed while the tree inserts a row are a view of the inserted tensor, and the view's
        address tells their position. With a window pool the tree may instead put the row's slots into a node
        and free the node's old slots, which are not shared."""
        if self._inserted is not None:
            start = (slots.data_ptr() - self._inserted.data_ptr()) // slots.element_size()
            if not 0 <= start <= len(self._inserted) - len(slots):
                assert self._has_window_pool, "not a part of the row"
                return np.zeros(len(slots), dtype=np.int64)
        assert self._row is not None, "nothing is known of entries that the tree did not announce"
        return self._row.between(start, start + len(slots))
