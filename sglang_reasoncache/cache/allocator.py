# SPDX-License-Identifier: Apache-2.0
"""SGLang's slot allocators with reference counts for shared pages.

SGLang's own code allocates. Our code frees: when a row (a request's block table) or a tree node gives up a
page, the page loses a reference. A page without references returns to the free list.
The host knows which slots of a row are shared (:class:`HostRow`), so freeing rows does not wait for the device.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import SharingBudget, WindowSharingBudget
from sglang_reasoncache.cache.continuations import Continuations
from sglang_reasoncache.cache.freed import FreedEntries
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.owner import NO_OWNER, SlotOwner
from sglang_reasoncache.cache.references import (
    Change,
    PageReferences,
    moved_references,
    named_pages,
)
from sglang_reasoncache.cache.repair import Repairs
from sglang_reasoncache.cache.swap import HostSwap, give_back_pinned
from sglang_reasoncache.compat.types import PrefixTree, Request
from sglang_reasoncache.device.in_flight import ReadsInFlight
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.errors import CannotShare


class _ReferenceCounted(compat.BaseTokenToKVPoolAllocator):
    """Code that our three allocators add to SGLang's allocators. At page size 1 a page is a slot."""

    page_size: int
    references: PageReferences
    #: Whether a slot may be read at a position other than the one its key was rotated for. Reset by a flush.
    has_shifted_slots: bool
    #: Whether rows may have entries below 0 (evicted positions). Reset by a flush.
    has_evicted: bool
    #: Row index in ``req_to_token`` -> the host's copy of that row. A row without a copy shares no slots.
    rows: dict[int, HostRow]
    #: Has some tokens computed again in prompts that reuse cached documents at new positions.
    repairs: Repairs
    #: The part of the prefix cache whose nodes alias.
    continuations: Continuations
    #: Whether finished requests become continuations.
    continues = False
    #: Decode steps read only some pages of rows longer than this. None: they read whole rows.
    read_whole: int | None = None
    #: Whom this allocator, the prefix tree over it and its prefill budgets ask (:meth:`attach`).
    owner: SlotOwner = NO_OWNER
    #: Keeps the KV of retracted requests in host memory. None: it is computed again.
    swap: HostSwap | None = None
    #: Makes copies wait for a forward that may still read what sharing freed.
    reads = ReadsInFlight()
    #: Records cached positions of what other servers prefill. None: this server prefills.
    handover: Handover | None = None
    budget: type = SharingBudget
    has_window_pool = False
    _release_unreferenced: Callable[[torch.Tensor], None]
    #: Whether SGLang releases a retracted request now (:meth:`releasing`).
    _releases = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        #: What is freed now; the tree says so.
        self.freed = FreedEntries(self.has_window_pool)
        super().__init__(*arguments, **named)

    def attach(
        self,
        owner: SlotOwner,
        swap: HostSwap | None = None,
        continues: bool = False,
        handover: Handover | None = None,
        stream: Any = None,
    ) -> None:
        """Let ``owner`` answer from now on. Called once, before requests arrive.

        ``swap``: keeps KV of retracted requests. ``continues``: whether what finished requests shared stays
        cached. ``handover``: records the cached positions of what this server does not prefill. ``stream``: see
        :class:`ReadsInFlight`."""
        assert self.owner is NO_OWNER, "an allocator has one owner"
        self.reads = ReadsInFlight(stream)
        self.handover = handover
        self.owner = owner
        self.swap = swap
        self.continues = continues

    def clear(self) -> None:
        super().clear()
        self.references = PageReferences()
        self.rows = {}
        self.repairs = Repairs()
        self.continuations = Continuations(self.page_size)
        if self.swap is not None:
            self.swap.give_back()
        if self.handover is not None:
            give_back_pinned()
        self.has_shifted_slots = False
        self.has_evicted = False
        self._held: list[torch.Tensor] = []

    @property
    def saved(self) -> int:
        """Number of slots that sharing saves running requests now, within requests and across requests."""
        return self.references.saved * self.page_size - self.continuations.aliased

    def prepare(self, lost: Sequence[int], gained: Sequence[int] = (), several: int = 0) -> Change:
        """Prepare a change that adds a reference to every page in ``gained``, then takes a reference from
        every page in ``lost``. Nothing changes yet. ``several``: see :meth:`PageReferences.set`."""
        counts, freed = self.references.changed(gained, lost)
        return Change(counts, upload(freed, self.device), several)

    def prepare_moved(self, moved: Iterable[tuple[HostRow, Mapping[int, int]]]) -> Change:
        """Prepare a change after positions were redirected in the host's rows. Nothing changes yet.

        ``moved``: rows, and for each redirected position of the row the slot that it named before."""
        lost = list[int]()
        gained = list[int]()
        for row, slots in moved:
            more = moved_references(row, slots, self.page_size)
            lost += more[0].tolist()
            gained += more[1].tolist()
        return self.prepare(lost, gained, several=len(gained) - len(lost))

    def prepare_known(self, slots: torch.Tensor, known: np.ndarray) -> Change:
        """Prepare a change that takes away the references of consecutive entries of a row or node. Nothing
        changes yet, and nothing waits for the device.

        Args:
            slots: The entries, int ``[entries]`` on the device. Only the last page may be incomplete.
            known: What the host knows of these entries, see :meth:`FreedEntries.known`.
        """
        page = self.page_size
        pages = slots[::page] // page if page > 1 else slots
        if not known.any():
            return Change({}, pages)
        holders, named, unknown = named_pages(known, page)
        change = self.prepare(named.tolist(), several=len(np.unique(holders)) - len(holders))
        kept = upload(unknown, self.device)
        return change._replace(freed=torch.cat((pages[kept].to(change.freed.dtype), change.freed)))

    @property
    def evicted(self) -> int:
        """Number of evicted positions of the rows now."""
        return sum(row.evicted for row in self.rows.values()) if self.has_evicted else 0

    def preallocated(self, req: Request) -> None:
        """``req`` got slots into which another server, or SGLang from its copy on the host, will write KV."""
        if self.handover is None:
            return
        if req.kv.retraction_backup is not None:
            # SGLang, and the handover, load copies into these slots next. (SGLang 0.5.22 does not wait.)
            self.reads.hold_stream()
        first = self.owner.once_more(self.handover.allocated, req)
        self.handover.loaded(req)
        if first is not None:
            self.row_of(req.kv.req_pool_idx).first_shared = first
            self.has_shifted_slots = True
        # A transfer obeys no stream.
        self.reads.hold_host()

    def row_of(self, index: int) -> HostRow:
        """The host's copy of the live row ``index`` of ``req_to_token``. Starts an empty one if none exists."""
        if index not in self.rows:
            self.rows[index] = HostRow()
        return self.rows[index]

    def commit(self, change: Change, *, evicts: bool = False) -> int:
        """Make a prepared change. Returns how many slots the change frees, now or when the free group ends.

        ``evicts``: whether the change evicts positions. Only two steps can fail: freeing slots, which is tried
        twice, and setting the counts, if host memory is used up. If either step fails, SGLang cannot go on.
        """
        self.has_evicted = self.has_evicted or evicts
        self.has_shifted_slots = self.has_shifted_slots or bool(change.counts)
        freed: int = change.freed.numel() * self.page_size
        if freed and self.free_group is not None:
            self._held.append(self.owner.once_more(change.freed.clone))
        elif freed:
            self.owner.once_more(self._release_unreferenced, change.freed)
        self.references.set(change.counts, change.several)
        self.continuations.lent.recount(change.counts)
        return freed

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free slots of a node, or of consecutive positions of a row from ``start_pos`` on. Only the last page
        may be incomplete."""
        if self._is_plain or not self.freed.has_row:
            super().free_segment(free_index, start_pos=start_pos)
        else:
            self._free_known(free_index, start_pos)

    @property
    def _is_plain(self) -> bool:
        """Whether SGLang's own code may free entries of a row or node: each holds one page, which nobody else
        holds."""
        return not (self.references or self.references.several or self.has_evicted)

    def _free_known(self, free_index: torch.Tensor, start_pos: int) -> None:
        if len(free_index):
            known = self.owner.once_more(self.freed.known, free_index, start_pos)
            self.commit(self.owner.once_more(self.prepare_known, free_index, known))

    def free_group_end(self) -> None:
        super().free_group_end()
        held = self._held
        self._held = []
        if held:
            self.owner.once_more(lambda: self._release_unreferenced(torch.cat(held)))

    def _free_unknown(self, *some: torch.Tensor) -> None:
        """Take away one reference for each page id in ``some``. On a GPU this waits for the device if any page
        is shared or any position was evicted."""
        self.commit(self.owner.once_more(self._prepare_unknown, some))

    def _prepare_unknown(self, some: tuple[torch.Tensor, ...]) -> Change:
        pages = self._without_evicted(some[0] if len(some) == 1 else torch.cat(some))
        ids = pages.tolist() if self.references else []
        known = not self.references.keys().isdisjoint(ids)
        return self.prepare(ids) if known else Change({}, pages)

    def _without_evicted(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` without entries below 0. On a GPU this waits for the device if ``has_evicted``."""
        return ids[ids >= 0] if self.has_evicted else ids

    def evict_to_free_tokens(self, tree_cache: PrefixTree, num_tokens: int) -> bool | None:
        """Evict cached prefixes until ``num_tokens`` slots are free. At page size 1, :meth:`reclaim_to` frees
        the rest. At others SGLang asks for a page per request, though few need one: so many cached prefixes may
        go, but what running requests share follows what is needed (:class:`_FreesSlots`)."""
        done: bool | None = super().evict_to_free_tokens(tree_cache, num_tokens)
        if self.page_size == 1:
            self.reclaim_to(num_tokens)
        return done

    @contextlib.contextmanager
    def releasing(self) -> Iterator[None]:
        """While SGLang releases a retracted request, and asks for slots for many steps ahead: cached prefixes
        go, but running requests do not share or lose positions for it."""
        self._releases = True
        try:
            yield
        finally:
            self._releases = False

    def reclaim_to(self, num_tokens: int, *, evicts: bool = True) -> None:
        """Have running requests free slots until ``num_tokens`` slots are free or no more can be freed.
        ``evicts``: whether policies may evict positions if sharing frees too few."""
        short = num_tokens - self.free_size()
        # Nothing is reclaimed inside a free group, because no slot becomes free before the group ends.
        if short > 0 and self.free_group is None and not self._releases:
            self.owner.reclaim(short, evicts)

    @property
    def shared_pool(self) -> Any:
        """The KV pool whose slots can be shared."""
        return self.get_kvcache()

    def alloc_restored(
        self, tree_cache: PrefixTree, count: int, in_window: int
    ) -> torch.Tensor | None:
        """Allocate slots for ``count`` consecutive positions whose KV comes from the host, int64 ``[count]``.
        None if there are too few. ``in_window``: how many of the last ones need a slot in the window pool."""
        if self.available_size() < count:
            self.evict_to_free_tokens(tree_cache, count)
            self.reclaim_to(count)
        slots: torch.Tensor | None = self.alloc(count)
        return slots

    def free_restored(self, slots: torch.Tensor, in_window: int) -> None:
        """Free what :meth:`alloc_restored` allocated."""
        self.free(slots)

    def release_window(self, slots: torch.Tensor) -> None:
        """Free the peers of ``slots``, whole pages, in the window pool, if there is one. All have peers."""

    def free_size(self) -> int:
        """Number of free slots in the pool whose slots can be shared."""
        return int(self.available_size())

    def create_prefill_budget(self, tree_cache: PrefixTree, **mixed: int) -> Any:
        promise = self.owner.promise()
        return self.budget(self, tree_cache, promise=promise, owner=self.owner, **mixed)


class SharedTokenAllocator(_ReferenceCounted, compat.TokenToKVPoolAllocator):
    """An allocator for page size 1, where slot ids are page ids."""

    def free(self, free_index: torch.Tensor) -> None:
        # At the end of a free group SGLang calls ``free`` again with all slots of the group.
        if self.free_group is None:
            self._free_unknown(free_index)
        else:
            super().free(free_index)

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        super().free(pages)


class _FreesSlots(_ReferenceCounted):
    """Frees slots that may share pages. At page sizes above 1 positions share slots one by one, but a page
    becomes free only once no position names any slot of it. If cached prefixes are not enough, running requests
    free the pages that an allocation needs, and no more."""

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: PrefixTree, **others: Any
    ) -> bool:
        """Whether the next decode step finds its ``num_tokens`` slots, whole pages, in a full and in a window
        pool."""
        fits: bool = super().check_decode_capacity(
            num_tokens=num_tokens, tree_cache=tree_cache, **others
        )
        if fits or self.page_size == 1:
            return fits
        self.reclaim_to(num_tokens)
        return bool(self.available_size() >= num_tokens)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        *others: Any,
        **named: Any,
    ) -> Any:
        """Allocate whole pages behind ``prefix_lens`` up to ``seq_lens``, int64 ``[requests]``."""
        pages = compat.get_num_new_pages(seq_lens_cpu, self.page_size, prefix_lens_cpu)
        self.reclaim_to(pages * self.page_size)
        return super().alloc_extend(
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, *others, **named
        )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, *others: Any, **named: Any
    ) -> Any:
        """Allocate a slot for each request's last token. ``seq_lens``: int64 ``[requests]``, with it."""
        pages = compat.get_num_new_pages(seq_lens_cpu, self.page_size, decode=True)
        self.reclaim_to(pages * self.page_size)
        return super().alloc_decode(seq_lens, seq_lens_cpu, *others, **named)

    def _free_slots(self, slots: torch.Tensor) -> None:
        """Free slots given in any order. A page may occur several times, wholly or in part, so the page loses
        as many references as its most frequent slot has occurrences."""
        self.commit(self.owner.once_more(self._prepare_slots, slots))

    def _prepare_slots(self, slots: torch.Tensor) -> Change:
        named: Counter[int] = Counter()
        for slot, times in Counter(slots.tolist()).items():
            page = slot // self.page_size
            named[page] = max(named[page], times)
        return self.prepare(list(named.elements()))


class SharedPagedAllocator(_FreesSlots, compat.PagedTokenToKVPoolAllocator):
    """An allocator for page sizes above 1."""

    def free(self, free_index: torch.Tensor) -> None:
        """Free slots that are in no row, in any order. SGLang's method frees each page once."""
        if self.free_group is None:
            free_index = self.owner.once_more(self._without_evicted, free_index)
        if self.free_group is not None or not self.references:
            super().free(free_index)
        else:
            self._free_slots(free_index)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        """SGLang returns freed pages to the free list only by calling this method."""
        self._free_unknown(*page_ids)

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        super()._release_page_ids(pages)


class SharedWindowAllocator(_FreesSlots, compat.SWATokenToKVPoolAllocator):
    """An allocator with two pools. Rows name slots of the full pool and may share them; the window pool serves
    sliding-window layers. A slot's *peer* is the slot of the same token in the window pool. SGLang frees the
    peer once the window has passed. Only then may the token's row entry name another slot."""

    budget = WindowSharingBudget
    has_window_pool = True

    @property
    def shared_pool(self) -> Any:
        return self.get_kvcache().full_kv_pool

    @property
    def window_pool(self) -> Any:
        """The KV pool of sliding-window layers."""
        return self.get_kvcache().swa_kv_pool

    def alloc_restored(
        self, tree_cache: PrefixTree, count: int, in_window: int
    ) -> torch.Tensor | None:
        full_short = max(count - self.full_available_size(), 0)
        window_short = max(in_window - self.swa_available_size(), 0)
        if full_short or window_short:
            tree_cache.evict_for_alloc(
                compat.EvictParams(num_tokens=full_short, swa_num_tokens=window_short)
            )
            self.reclaim_to(count)
        if not self.new_pages_available(count // self.page_size, in_window // self.page_size):
            return None
        slots: torch.Tensor = self.full_attn_allocator.alloc(count)
        self.clear_full_to_swa_mapping(slots)
        if in_window:
            peers = self.swa_attn_allocator.alloc(in_window)
            self.set_full_to_swa_mapping(slots[count - in_window :], peers)
        return slots

    def free_restored(self, slots: torch.Tensor, in_window: int) -> None:
        self.release_window(slots[len(slots) - in_window :])
        self._free_full(slots)

    def release_window(self, slots: torch.Tensor) -> None:
        self.free_swa_segment(slots, start_pos=0)

    def free_size(self) -> int:
        return int(self.full_available_size())

    def free(self, free_index: torch.Tensor) -> None:
        self.free_swa(free_index)
        self._free_full(free_index)

    def _free_full(self, slots: torch.Tensor) -> None:
        if self._is_plain:
            self.full_attn_allocator.free(slots)
        else:
            self._free_slots(slots)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.free_swa_segment(free_index, start_pos=start_pos)
        self.free_full_segment(free_index, start_pos=start_pos)

    def free_full_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Free slots of the full pool. SGLang's method requires slots without peers. Here a slot may have one:
        a shared slot keeps its peer until the window of the request that wrote the slot has passed."""
        if self._is_plain:
            self.full_attn_allocator.free_segment(free_index, start_pos=start_pos)
        elif self.freed.has_row:
            self._free_known(free_index, start_pos)
        else:
            self._free_slots(free_index)

    def _release_unreferenced(self, pages: torch.Tensor) -> None:
        self.full_attn_allocator.free_page_ids(pages)


Shared = SharedTokenAllocator | SharedPagedAllocator | SharedWindowAllocator


def shared_allocator_of(stock: Any) -> Shared:
    """Our allocator to replace SGLang's allocator ``stock``. Raises CannotShare for unknown allocators."""
    where: dict[str, Any] = dict(dtype=stock.dtype, device=stock.device)
    where |= dict(kvcache=stock.get_kvcache(), need_sort=stock.need_sort)
    if type(stock) is compat.TokenToKVPoolAllocator:
        return SharedTokenAllocator(stock.size, **where)
    if type(stock) is compat.PagedTokenToKVPoolAllocator:
        return SharedPagedAllocator(stock.size, page_size=stock.page_size, **where)
    if type(stock) is compat.SWATokenToKVPoolAllocator and not stock.swa_req_ring:
        sizes = stock.size_full, stock.size_swa, stock.page_size
        return SharedWindowAllocator(*sizes, **where)
    raise CannotShare(
        f"--enable-reasoncache supports token and paged allocators of a plain attention pool, "
        f"this model uses {type(stock).__name__} (hybrid, sliding-window or state-space memory)"
    )
