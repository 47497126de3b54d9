# SPDX-License-Identifier: Apache-2.0
"""SGLang's slot allocators with reference counts.

Only the way back to the free list changes: there a shared page loses one reference per
occurrence, and stays in use until its last one. Nothing waits for the device: the host knows which
entries of a row share, because it decided that (:class:`SlotNames`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.slot_names import EVICTED, SlotNames
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import PrefixTree, SlotAllocator

#: Output tokens of the running requests from which on their share says something.
_LEAST_RUNNING = 512


class SharingBudget(compat.PrefillBudget):
    """``PrefillBudget`` with decode reservations, ``total_offset - current_offset``, cut by a
    credit in [0, 1). Prompts are never discounted."""

    def __init__(
        self, allocator: SlotAllocator, tree_cache: PrefixTree, *, credit: float, **kwargs: int
    ) -> None:
        super().__init__(allocator, tree_cache, **kwargs)
        self._kept = 1.0 - credit

    @property
    def remaining_total(self) -> float:
        future = max(self.total_offset - self.current_offset, 0)
        return self._available_and_evictable() - self.current_offset - future * self._kept

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: int, chunk_limit: int | None, **_unused: int
    ) -> tuple[bool, int | None]:
        now = min(self.ceil_paged_tokens(extend_input_len), total_tokens)
        needed = now + (total_tokens - now) * self._kept
        return (True, chunk_limit) if needed < self.remaining_total else (False, None)


class SharingForecast:
    """Share of output positions that ended up shared, over recent requests.

    Exponentially weighted by tokens with a memory of ``horizon`` output tokens. The running
    requests count where they share more already: long responses end late.
    """

    def __init__(self, limit: float, horizon: float = 20_000.0) -> None:
        self._limit, self._horizon = limit, horizon
        self._shared = self._tokens = self._running = 0.0

    def observe(self, shared: int, tokens: int) -> None:
        """A request ended with ``shared`` of its ``tokens`` output positions redirected."""
        if tokens <= 0:
            return
        fade = max(0.0, 1.0 - tokens / self._horizon)
        self._shared = self._shared * fade + shared
        self._tokens = self._tokens * fade + tokens

    def poll(self, shared: int, tokens: int) -> None:
        """``shared`` of the ``tokens`` output positions of all running requests are redirected."""
        self._running = shared / tokens if tokens >= _LEAST_RUNNING else 0.0

    @property
    def credit(self) -> float:
        """Share to count on, in [0, limit]."""
        finished = self._shared / self._tokens if self._tokens else 0.0
        return min(max(finished, self._running), self._limit)


class ReferenceCountError(AssertionError):
    """The books do not balance: a bug of ours, never bad input."""


class PageReferences(dict[int, int]):
    """References of pages, by page id, on the host; a page that is absent and not free has one.

    A *reference* is an entry that names the page: a position of a tree node, or of a live row that
    its request owns (from ``cache_protected_len`` on).
    """

    def add(self, pages: Iterable[int]) -> None:
        """One more reference for every occurrence of a page in ``pages``."""
        for page in pages:
            self[page] = self.get(page, 1) + 1

    def drop(self, pages: Sequence[int]) -> list[int]:
        """Take one reference away per occurrence; return the pages left with none, in the order
        of their last occurrences. Raises ReferenceCountError where there are too few."""
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


class _Shared(compat.BaseTokenToKVPoolAllocator):
    """What both allocators add. A page is a slot at page size 1."""

    page_size: int
    references: PageReferences
    #: Any slot may be used away from its cached position, until the cache is flushed: the tree can
    #: hold a shifted slot with one reference.
    has_shifted_slots: bool
    #: Likewise, rows may have entries below 0, evicted positions.
    has_evicted: bool
    #: By row; a row that is absent shares nothing.
    names: dict[int, SlotNames]
    #: Set by the prefix tree: slots or ``EVICTED``, int64 ``[entries]``, of a part of a row or of a
    #: node that begins at a position; 0: an entry that shares nothing.
    names_of: Callable[[torch.Tensor, int], np.ndarray] | None = None
    credit_source: Callable[[], float] | None = None
    _release_unreferenced: Callable[[torch.Tensor], None]

    def clear(self) -> None:
        super().clear()
        self.references, self.names = PageReferences(), {}
        self.has_shifted_slots = self.has_evicted = False
        self._held: list[torch.Tensor] = []

    def share(self, pages: list[int]) -> None:
        """Add one reference per occurrence. ``pages``: ids of pages in use."""
        self.references.add(pages)
        self.has_shifted_slots = True

    def name(self, row: int, positions: Sequence[int], slots: Sequence[int]) -> None:
        """Positions of a row share these slots, or are the first ones that have them."""
        self.names.setdefault(row, SlotNames()).set(positions, slots)

    def release(self, pages: list[int]) -> None:
        """Take one reference away per occurrence; pages left with none are free at once."""
        last = self.references.drop(pages)
        if last:
            self._release_unreferenced(upload(last, self.device))

    def evict(self, row: int, positions: np.ndarray, slots: torch.Tensor) -> int:
        """Likewise, of the evicted positions of a row, whole pages; return how many slots came
        back. ``slots``: theirs."""
        self.has_evicted = True
        before: int = self.available_size()
        names = self.names.setdefault(row, SlotNames())
        self._release_named(slots, names.at(positions))
        names.set(positions, EVICTED)
        return self.available_size() - before

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Slots of a row from a position on, or of a node. Whole pages but for the last one."""
        if self.names_of is None or not (self.references or self.has_evicted):
            super().free_segment(free_index, start_pos=start_pos)
        elif len(free_index):
            self._release_named(free_index, self.names_of(free_index, start_pos))

    def _release_named(self, slots: torch.Tensor, names: np.ndarray) -> None:
        """``names``: see :attr:`names_of`."""
        page, first = self.page_size, names[:: self.page_size]
        pages = slots[::page] // page if page > 1 else slots
        named = np.flatnonzero(first)
        if len(named):
            shared = [n // page for n in first[named].tolist() if n != EVICTED]
            kept = np.delete(np.arange(len(first)), named)
            last = upload(self.references.drop(shared), self.device)
            pages = torch.cat((pages[upload(kept, self.device)].to(last.dtype), last))
        if self.free_group is not None:
            self._held.append(pages.clone())
        elif len(pages):
            self._release_unreferenced(pages)

    def free_group_end(self) -> None:
        super().free_group_end()
        held, self._held = self._held, []
        if held:
            self._release_unreferenced(torch.cat(held))

    def _without_evicted(self, ids: torch.Tensor) -> torch.Tensor:
        """Of entries that nobody knows. On a GPU this waits for it."""
        return ids[ids >= 0] if self.has_evicted else ids

    def _last_references(self, pages: torch.Tensor) -> torch.Tensor:
        """Those of ``pages`` (int64, one entry per reference) that nothing refers to any more."""
        # Only while something is shared: this waits for a GPU.
        ids = pages.tolist() if self.references else []
        if self.references.keys().isdisjoint(ids):
            return pages
        return upload(self.references.drop(ids), self.device)

    def create_prefill_budget(self, tree_cache: PrefixTree, **mixed: int) -> Any:
        credit = 0.0 if self.credit_source is None else self.credit_source()
        if credit <= 0:
            return super().create_prefill_budget(tree_cache, **mixed)
        return SharingBudget(self, tree_cache, credit=credit, **mixed)


class SharedTokenAllocator(_Shared, compat.TokenToKVPoolAllocator):
    """Page size 1: slot ids are page ids."""

    def free(self, free_index: torch.Tensor) -> None:
        # The indices of a free group come back through here, all at once, when it ends.
        if self.free_group is None:
            free_index = self._last_references(self._without_evicted(free_index))
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
            free_index = self._without_evicted(free_index)
        if self.free_group is not None or not self.references:
            super().free(free_index)
            return
        named: Counter[int] = Counter()
        for slot, times in Counter(free_index.tolist()).items():
            page = slot // self.page_size
            named[page] = max(named[page], times)
        self.release(list(named.elements()))

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        """The one way back to the free list; see :meth:`_last_references`."""
        last = self._last_references(self._without_evicted(torch.cat(page_ids)))
        if last.numel():
            super()._release_page_ids(last)

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
