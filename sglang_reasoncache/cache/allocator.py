# SPDX-License-Identifier: Apache-2.0
"""SGLang's slot allocators with reference counts.

Nothing about allocation changes. On the way back to the free list every page
passes one method, and there a shared page loses one reference per occurrence
and stays in use until its last one.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import CreditSource, SharingBudget
from sglang_reasoncache.cache.references import PageReferences
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import PrefixTree, SlotAllocator


class _Shared(compat.BaseTokenToKVPoolAllocator):
    """What both allocators add.

    Attributes:
        references: Of pages (slots at page size 1).
        has_shifted_slots: Whether any slot may be used away from its cached position. True until
            the cache is flushed: the tree can hold a shifted slot with one reference.
        has_evicted: Whether rows may have entries below 0, evicted positions; likewise.
        credit_source: Of admission.
    """

    page_size: int
    references: PageReferences
    has_shifted_slots: bool
    has_evicted: bool
    credit_source: CreditSource | None = None

    def clear(self) -> None:
        super().clear()
        self.references = PageReferences()
        self.has_shifted_slots = self.has_evicted = False

    def share(self, pages: list[int]) -> None:
        """Add one reference per occurrence. ``pages``: ids of pages in use."""
        self.references.add(pages)
        self.has_shifted_slots = True

    def release(self, pages: list[int]) -> None:
        """Take one reference away per occurrence; pages left with none are free at once.

        Never reads from the device: the caller knows the ids.
        """
        last = self.references.drop(pages)
        if last:
            self._release_unreferenced(upload(last, self.device))

    def evict(self, pages: torch.Tensor) -> int:
        """Take one reference away per entry (int64, pages in use), of evicted positions.

        Reads from the device only while something is shared. Returns how many slots came back:
        those of pages with no other reference.
        """
        self.has_evicted = True
        before: int = self.available_size()
        last = self._last_references(pages)
        if last.numel():
            self._release_unreferenced(last)
        return self.available_size() - before

    def _without_evicted(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` (slots or pages of a row) less the entries of evicted positions.

        SGLang frees rows as they are. On a GPU this waits for it.
        """
        return ids[ids >= 0] if self.has_evicted else ids

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        raise NotImplementedError

    def _last_references(self, pages: torch.Tensor) -> torch.Tensor:
        """The pages of ``pages`` (int64, one entry per reference) that nothing refers to any more.

        Reads the ids back to the host only while something is shared; that
        happens when a request ends or a node is evicted, not on a decode step.
        """
        if not self.references:
            return pages
        ids = pages.tolist()
        if not self.references.touches(ids):
            return pages
        return torch.tensor(self.references.drop(ids), dtype=pages.dtype, device=pages.device)

    def create_prefill_budget(
        self, tree_cache: PrefixTree, *, num_mixed_decode_tokens: int = 0
    ) -> Any:
        credit = 0.0 if self.credit_source is None else self.credit_source()
        mixed = dict(num_mixed_decode_tokens=num_mixed_decode_tokens)
        if credit <= 0:
            return super().create_prefill_budget(tree_cache, **mixed)
        return SharingBudget(self, tree_cache, credit=credit, **mixed)


class SharedTokenAllocator(_Shared, compat.TokenToKVPoolAllocator):
    """Page size 1: slot ids are page ids."""

    def free(self, free_index: torch.Tensor) -> None:
        # Inside a free group the indices only wait; they come back through
        # here, all at once, when the group ends.
        if self.free_group is None:
            free_index = self._last_references(self._without_evicted(free_index))
        super().free(free_index)

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        super().free(pages)


class SharedPagedAllocator(_Shared, compat.PagedTokenToKVPoolAllocator):
    """Page size above 1: pages are shared whole."""

    def free(self, free_index: torch.Tensor) -> None:
        """Free token slots that belong to whole pages.

        Stock ``free`` deduplicates pages, which would lose the second reference
        of a page that a row names twice. Rows are runs of whole pages apart
        from their ends, so a page's references are the runs it appears in.
        """
        if self.free_group is None:
            free_index = self._without_evicted(free_index)
        if self.free_group is not None or not self.references:
            super().free(free_index)
            return
        pages = free_index // self.page_size
        starts = torch.ones_like(pages, dtype=torch.bool)
        # A new run starts where the page changes or the offset wraps around.
        starts[1:] = (pages[1:] != pages[:-1]) | (free_index[1:] <= free_index[:-1])
        self._release_page_ids(pages[starts])

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        """The one way back to the free list; see :meth:`_last_references`."""
        last = self._last_references(self._without_evicted(torch.cat(page_ids)))
        if last.numel():
            super()._release_page_ids(last)

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        super()._release_page_ids(pages)


def shared_allocator_of(stock: SlotAllocator) -> SharedTokenAllocator | SharedPagedAllocator:
    """Rebuild a freshly made stock allocator as ours, same size and pool.

    Raises:
        ValueError: any other allocator: its pool layout is not supported.
    """
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
