# SPDX-License-Identifier: Apache-2.0
"""SGLang's slot allocators with reference counts.

Only the way back to the free list changes: there a shared page loses one reference per
occurrence, and stays in use until its last one. Nothing waits for the device: the host knows which
entries of a row share, because it decided that (:class:`HostRow`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import SharingBudget
from sglang_reasoncache.cache.host_row import EVICTED, HostRow
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import PrefixTree, SlotAllocator


class ReferenceCountError(AssertionError):
    """The books do not balance: a bug of ours, never bad input."""


class PageReferences(dict[int, int]):
    """References of pages, by page id, on the host; a page that is absent and not free has one.

    A *reference* is an entry that names the page: a position of a tree node, or of a live row that
    its request owns (from ``cache_protected_len`` on). ``extra``: all of them but the pages' first.
    """

    extra = 0

    def changed(
        self, gained: Iterable[int], lost: Iterable[int]
    ) -> tuple[dict[int, int], list[int]]:
        """Counts after one reference more per occurrence in ``gained`` and one less per occurrence
        in ``lost``, and the pages left with none, in the order of their last occurrences. Raises
        ReferenceCountError where there are too few."""
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
    """New counts of references, by page, and ids of pages to free: int64, on the pool's device."""

    counts: dict[int, int]
    freed: torch.Tensor


class _Shared(compat.BaseTokenToKVPoolAllocator):
    """What both allocators add. A page is a slot at page size 1."""

    page_size: int
    references: PageReferences
    #: Any slot may be used away from its cached position, until the cache is flushed: the tree can
    #: hold a shifted slot with one reference.
    has_shifted_slots: bool
    #: Likewise, rows may have entries below 0, evicted positions.
    has_evicted: bool
    #: By index in SGLang's pool of rows; a row that is absent shares nothing.
    rows: dict[int, HostRow]
    #: Set by the prefix tree: slots or ``EVICTED``, int64 ``[entries]``, of a part of a row or of a
    #: node that begins at a position; 0: an entry that shares nothing.
    names_of: Callable[[torch.Tensor, int], np.ndarray] | None = None
    #: Likewise: positions of nodes whose slot is counted elsewhere on their path.
    aliases_of_tree: Callable[[], int] | None = None
    #: Set by the plugin: slots that running requests can give by sharing; what has them give so many,
    #: if they can; what is called when a request must wait; the share of their future output that
    #: admission counts as shared.
    shareable: Callable[[], int] | None = None
    reclaim: Callable[[int], None] | None = None
    refused: Callable[[], None] | None = None
    credit_source: Callable[[], float] | None = None
    #: Calls what changes nothing yet, with its arguments; the plugin's does so again if it fails.
    once_more: Callable[..., Any] = operator.call
    _release_unreferenced: Callable[[torch.Tensor], None]

    def clear(self) -> None:
        super().clear()
        self.references, self.rows = PageReferences(), {}
        self.has_shifted_slots = self.has_evicted = False
        self._held: list[torch.Tensor] = []

    @property
    def saved(self) -> int:
        """Slots that the rows do without by sharing, whoever they share with."""
        in_tree = 0 if self.aliases_of_tree is None else self.aliases_of_tree()
        return self.references.extra * self.page_size - in_tree

    def prepare(self, lost: Sequence[int], gained: Sequence[int] = ()) -> Change:
        """What becomes of pages in use by one reference less for every entry of ``lost``, after one
        more for every entry of ``gained``. Nothing changes yet."""
        counts, freed = self.references.changed(gained, lost)
        return Change(counts, upload(freed, self.device))

    def prepare_named(self, slots: torch.Tensor, names: np.ndarray) -> Change:
        """Likewise, of consecutive entries of a row or node, whole pages but for the last one;
        ``names``: see :attr:`names_of`. Waits for no device."""
        page, first = self.page_size, names[:: self.page_size]
        pages = slots[::page] // page if page > 1 else slots
        named = np.flatnonzero(first)
        if not len(named):
            return Change({}, pages)
        change = self.prepare([n // page for n in first[named].tolist() if n != EVICTED])
        kept = upload(np.delete(np.arange(len(first)), named), self.device)
        return Change(change.counts, torch.cat((pages[kept].to(change.freed.dtype), change.freed)))

    def row_of(self, index: int) -> HostRow:
        """Of a live row, by its index in SGLang's pool."""
        if index not in self.rows:
            self.rows[index] = HostRow()
        return self.rows[index]

    def commit(self, change: Change, *, evicts: bool = False) -> int:
        """Make a prepared change, all of it or nothing; return how many slots came back.

        ``evicts``: the pages are those of evicted positions. Only SGLang's own free can fail, twice,
        and counts, for want of some bytes of host memory: then SGLang itself cannot go on either.
        """
        self.has_evicted = self.has_evicted or evicts
        self.has_shifted_slots = self.has_shifted_slots or bool(change.counts)
        freed: int = change.freed.numel() * self.page_size
        if freed and self.free_group is not None:
            self._held.append(self.once_more(change.freed.clone))
        elif freed:
            self.once_more(self._release_unreferenced, change.freed)
        self.references.set(change.counts)
        return freed

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Slots of a row from a position on, or of a node. Whole pages but for the last one."""
        if self.names_of is None or not (self.references or self.has_evicted):
            super().free_segment(free_index, start_pos=start_pos)
        elif len(free_index):
            self.free_named(free_index, self.once_more(self.names_of, free_index, start_pos))

    def free_named(self, slots: torch.Tensor, names: np.ndarray) -> None:
        """Slots of a row or of a node of which the host knows ``names``."""
        self.commit(self.once_more(self.prepare_named, slots, names))

    def free_group_end(self) -> None:
        super().free_group_end()
        held, self._held = self._held, []
        if held:
            self.once_more(lambda: self._release_unreferenced(torch.cat(held)))

    def _free_unknown(self, *some: torch.Tensor) -> None:
        """Take one reference away for each entry; on a GPU this waits while something is shared."""
        self.commit(self.once_more(self._prepare_unknown, some))

    def _prepare_unknown(self, some: tuple[torch.Tensor, ...]) -> Change:
        pages = self._without_evicted(some[0] if len(some) == 1 else torch.cat(some))
        ids = pages.tolist() if self.references else []
        known = not self.references.keys().isdisjoint(ids)
        return self.prepare(ids) if known else Change({}, pages)

    def _without_evicted(self, ids: torch.Tensor) -> torch.Tensor:
        """Of entries that nobody knows. On a GPU this waits for it."""
        return ids[ids >= 0] if self.has_evicted else ids

    def evict_to_free_tokens(self, tree_cache: PrefixTree, num_tokens: int) -> bool | None:
        """Where SGLang is short: of cached prefixes first, then by having running requests share."""
        done: bool | None = super().evict_to_free_tokens(tree_cache, num_tokens)
        self.reclaim_to(num_tokens)
        return done

    def reclaim_to(self, num_tokens: int) -> None:
        """Have running requests share until ``num_tokens`` slots are free, if that brings them."""
        short = num_tokens - self.available_size()
        # What a group frees comes back at its end.
        if short > 0 and self.reclaim is not None and self.free_group is None:
            self.reclaim(short)

    def create_prefill_budget(self, tree_cache: PrefixTree, **mixed: int) -> Any:
        credit = 0.0 if self.credit_source is None else self.credit_source()
        if credit <= 0 and self.shareable is None:
            return super().create_prefill_budget(tree_cache, **mixed)
        shareable = 0 if self.shareable is None else self.shareable()
        return SharingBudget(self, tree_cache, shareable=shareable, credit=credit, **mixed)


class SharedTokenAllocator(_Shared, compat.TokenToKVPoolAllocator):
    """Page size 1: slot ids are page ids."""

    def free(self, free_index: torch.Tensor) -> None:
        # The indices of a free group come back through here, all at once, when it ends.
        if self.free_group is None:
            self._free_unknown(free_index)
        else:
            super().free(free_index)

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        super().free(pages)


class SharedPagedAllocator(_Shared, compat.PagedTokenToKVPoolAllocator):
    """Page size above 1: pages are shared whole."""

    def free(self, free_index: torch.Tensor) -> None:
        """Slots in any order. Stock ``free`` deduplicates pages, but rows may name one several times.
        Rows begin at a page and end anywhere, so a page is named as often as the most frequent of
        its slots."""
        if self.free_group is None:
            free_index = self.once_more(self._without_evicted, free_index)
        if self.free_group is not None or not self.references:
            super().free(free_index)
        else:
            self.commit(self.once_more(self._prepare_slots, free_index))

    def _prepare_slots(self, slots: torch.Tensor) -> Change:
        named: Counter[int] = Counter()
        for slot, times in Counter(slots.tolist()).items():
            page = slot // self.page_size
            named[page] = max(named[page], times)
        return self.prepare(list(named.elements()))

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        """The one way back to the free list."""
        self._free_unknown(*page_ids)

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        super()._release_page_ids(pages)


def shared_allocator_of(stock: SlotAllocator) -> SharedTokenAllocator | SharedPagedAllocator:
    """Rebuild a freshly made stock allocator as ours. Raises ValueError for other pool layouts."""
    where: dict[str, Any] = dict(dtype=stock.dtype, device=stock.device)
    where |= dict(kvcache=stock.get_kvcache(), need_sort=stock.need_sort)
    if type(stock) is compat.TokenToKVPoolAllocator:
        return SharedTokenAllocator(stock.size, **where)
    if type(stock) is compat.PagedTokenToKVPoolAllocator:
        return SharedPagedAllocator(stock.size, page_size=stock.page_size, **where)
    raise ValueError(
        f"--enable-reasoncache supports token and paged allocators of a plain attention pool, "
        f"this model uses {type(stock).__name__} (hybrid, sliding-window or state-space memory)"
    )
