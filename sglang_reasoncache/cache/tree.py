# SPDX-License-Identifier: Apache-2.0
"""SGLang's unified prefix cache (radix tree), extended to rows (requests' block tables) that share slots.

A row is published (entered into the tree core) up to the first position that was redirected to another slot,
was evicted, or has a slot that another row names or named. So no node names a slot twice, the core's KV is
exact (as without this plugin), and no row names a slot of an unlocked node. SGLang's tree cores (Rust, Python)
therefore count evictable slots correctly. What a finished request shared becomes a continuation of its path
(``continuations.py``), which this class counts, matches, locks and evicts beside the core. A continuation may
borrow slots of its path: it is evicted before them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import Shared
from sglang_reasoncache.cache.composition import (
    CachedDocuments,
    Composition,
    CompositionLock,
    marked,
)
from sglang_reasoncache.cache.continuation import Continued, Part
from sglang_reasoncache.cache.continuations import Continuations
from sglang_reasoncache.cache.freed import NOTHING_SHARED, FreedEntries
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.owner import SlotOwner
from sglang_reasoncache.cache.repair import RepairedRow, missed
from sglang_reasoncache.cache.states import LastState, begin_with, empty_ring, last_state
from sglang_reasoncache.cache.swap import Restored, computed_length, swapped_of
from sglang_reasoncache.compat.carriers import CONTINUED, SWAPPED
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.custom_params import only_scores, takes_part


@dataclasses.dataclass
class ContinuedLock(compat.TreeLock):
    """SGLang's lock of a path in the tree, and the continuations that are pinned beside it.

    Attributes:
        parts: These continuations. None are pinned if it is empty.
        reads_ending: Whether the request needs their ending.
    """

    parts: tuple[Part, ...] = ()
    reads_ending: bool = False


class SharedRadixCache(compat.UnifiedRadixCache):
    """``UnifiedRadixCache`` over one of our allocators."""

    token_to_kv_pool_allocator: Shared
    #: Whether the slots that were loaded last belong to a request.
    _loads_swapped = False
    #: A continuation is read if (new tokens of a prompt) x (tokens before them) is at most this. None: always.
    most_pairs: int | None = None
    #: Slots of continuations that were freed while the core evicted.
    _freed_before = 0
    #: What :meth:`_window_to_swap` found for the request whose row is being freed.
    _window: torch.Tensor | None = None

    @property
    def owner(self) -> SlotOwner:
        """Whom this tree asks."""
        return self.token_to_kv_pool_allocator.owner

    @property
    def _continuations(self) -> Continuations:
        return self.token_to_kv_pool_allocator.continuations

    @property
    def _freed(self) -> FreedEntries:
        return self.token_to_kv_pool_allocator.freed

    def reset(self) -> None:
        self.owner.flushed()
        super().reset()

    def checkpoint_into_tree(self, req: Request, *, up_to: int, **kwargs: Any) -> None:
        """Publish the row of ``req``, at most up to ``up_to`` (:meth:`_publishable`). If that method fails,
        nothing is published. All our code that may fail runs before the tree changes.

        A running request publishes only its prompt, because positions that the tree owns cannot be redirected.
        If a policy may evict positions of the prompt, a running request publishes nothing.
        """
        running = not req.finished()
        if running and self.owner.keeps_prompt(req):
            # Policies do not evict inside a free group. ``Controller.after_prefill`` handles the last chunk.
            grouped = self.token_to_kv_pool_allocator.free_group is not None
            if up_to < len(req.full_untruncated_fill_ids) and not grouped:
                self.owner.after_chunk(req, up_to)
            return
        if running and self.is_mamba_enabled:
            # The forward of the first chunk has copied the state with which the request began.
            self._release_ending(req)
        end = req.kv.cache_protected_len
        continues = not running and self.token_to_kv_pool_allocator.continues
        with self.owner.contained_alone():
            end = self.owner.once_more(self._publishable, req, up_to, running)
        state = None
        goes_on = isinstance(req.last_node, Continued)
        if continues and self.is_mamba_enabled and (end < up_to or goes_on):
            exact = req.kv.cache_protected_len if goes_on else end
            with self.owner.contained_alone():
                state = self._continue_with_state(req, up_to, exact)
        if state is not None:
            state.release_others(req)
            return
        publishes = True
        if self.is_swa_enabled and end < up_to and end <= self._freed_of_window(req):
            # The window before ``end`` is freed. SGLang would match no prefix that lacks its last window.
            end = 0
        if self.is_mamba_enabled and end < up_to:
            # State layers hold the state after all ``up_to`` positions, which does not fit a shorter prefix.
            if running:
                publishes = False
            elif not self.enable_mamba_extra_buffer:
                # Without the extra buffer SGLang has no copy of the state at an earlier position.
                end = 0
            elif end < (req.kv.mamba_last_track_seqlen or 0) and compat.state_copy_in_flight(
                req.kv
            ):
                # The shorter row needs the older of the two copies, which a forward in flight may replace.
                # SGLang itself never cuts so much that it needs that copy then.
                end = 0
        if isinstance(req.last_node, Restored) and running:
            self._note_restored(req)
        if isinstance(req.last_node, Composition | Continued):
            # KV behind a document used at a new position is not exact, and the core holds exact KV only. Nor
            # does the core have the path that a continuation belongs to.
            end = 0
            publishes = publishes and not (running and self.is_mamba_enabled)
        if publishes:
            with self._freed.of(self._host_row(req.kv)):
                super().checkpoint_into_tree(req, up_to=end, **kwargs)
        if continues and not self.is_mamba_enabled:
            with self.owner.contained_alone():
                self._continue(req, up_to)
        if self.is_swa_enabled and not self.disable and running and end < up_to:
            # Admission expects the slots of passed windows to be free. The call above stopped at ``end``.
            self.evict_sliding_windows(req, up_to - 1)

    @property
    def _window_in_pages(self) -> int:
        """Number of slots in the whole pages of a window that ends with a page."""
        return -(-int(self.sliding_window_size) // self.page_size) * self.page_size

    @property
    def least_window_pool(self) -> int:
        """The fewest slots of the window pool with which SGLang admits a request that comes back from the host,
        however little else is there: for the window that comes back, and for one to decode, beside the nodes
        that its cached prefix locks there, a window and the rest of the node where it begins. 0 without such a
        pool."""
        if not self.is_swa_enabled:
            return 0
        in_pages = self._window_in_pages
        interval: int = compat.envs.SGLANG_SWA_EVICTION_INTERVAL.get()
        needed = self.sliding_window_size + self.page_size + in_pages
        locked = self.sliding_window_size + max(in_pages, interval + self.page_size)
        return int(needed + locked + 1)

    def _freed_of_window(self, req: Request) -> int:
        """The position up to which ``req`` has lost its slots in the window pool."""
        return compat.freed_of_window(req.kv, self.page_size)[1]

    def _note_restored(self, req: Request) -> None:
        """Record in the host's copy of a restored row what is approximate, before publishing puts a node in
        the place of ``Restored``."""
        index = req.kv.req_pool_idx
        first = self._first_approximate(req, self._host_row(req.kv))
        if first is not None:
            self.token_to_kv_pool_allocator.row_of(index).first_shared = first

    def _first_approximate(self, req: Request, row: HostRow) -> int | None:
        """The first position whose KV is approximate: it or one before it was redirected, or it was decoded by
        layers that read some pages only. None if all is exact."""
        first = _first_shared(req, row)
        read_whole = self.token_to_kv_pool_allocator.read_whole
        if read_whole is None or not req.output_ids or not takes_part(req):
            return first
        chosen = max(read_whole, len(req.origin_input_ids))
        if chosen >= len(req.origin_input_ids) + len(req.output_ids):
            return first
        return chosen if first is None else min(first, chosen)

    def _publishable(self, req: Request, up_to: int, running: bool) -> int:
        """The position up to which the row may be published."""
        if running and len(req.output_ids):
            # After a retraction, a request that is prefilled again already has output.
            up_to = min(up_to, len(req.origin_input_ids))
        row = self._host_row(req.kv)
        bounds = [
            # KV behind the first evicted position may have been computed without that position.
            *row.evicted_from(0)[:1].tolist(),
            # The tree would count a page that another row names as evictable: evicting it would free nothing.
            row.first_in_other_rows(up_to),
            self._first_approximate(req, row),
        ]
        if not running and self.token_to_kv_pool_allocator.continues:
            # A page that a continuation names belongs to the continuation.
            bounds.append(row.first_named_twice(req.kv.cache_protected_len))
        for bound in bounds:
            if bound is not None and bound < up_to:
                up_to = bound - bound % self.page_size
        return max(up_to, req.kv.cache_protected_len)

    def _continue_with_state(self, req: Request, up_to: int, exact: int) -> LastState | None:
        """Keep what a finished request computed, up to the last position whose state SGLang has. Returns that
        state if it is kept. None if not, or if all KV up to there is ``exact``."""
        state = last_state(self, req, up_to)
        if state is None or state.length <= exact:
            return None
        return state if self._continue(req, state.length, state.slot) else None

    def _continue(self, req: Request, up_to: int, ending: torch.Tensor | None = None) -> bool:
        """Keep what a finished request computed behind the part that it published, if that is approximate, goes
        on with a continuation, or is read by other responses to the same prompt. Returns whether it is kept.

        ``ending``: slot of the state after ``up_to`` positions, in models with state layers. In models with a
        window pool it is the last window."""
        row = self._host_row(req.kv)
        start = req.kv.cache_protected_len
        prefix = req.last_node if isinstance(req.last_node, Continued) else None
        first = self._first_approximate(req, row)
        is_plain = prefix is None and first is None and not row.in_other_rows
        if isinstance(req.last_node, Composition | Restored) or is_plain:
            return False
        end = min([up_to, *row.evicted_from(0)[:1].tolist()])
        if self.tree_core.is_eagle:
            # A draft layer's KV of a position depends on the next token, too: SGLang's keys are pairs.
            end -= 1
        end -= end % self.page_size
        if end <= start or (ending is not None and end < up_to):
            return False
        borrowed = row.named_before_and_after(start)
        slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, start:end].long()
        key = compat.RadixKey(
            req.full_untruncated_fill_ids[:end], req.extra_key, cache_salt=req.cache_salt
        )
        exact = end if first is None else first
        needed = 1
        passed = slots[:0]
        if self.is_swa_enabled:
            needed = self._window_in_pages
            first_alive = max(start, self._freed_of_window(req))
            window_at = max(end - needed, start)
            if window_at < first_alive:
                return False
            passed = slots[first_alive - start : window_at - start]
            ending = slots[window_at - start :]
        is_kept = self._continuations.add(
            key,
            prefix,
            node=req.last_node,
            start=start,
            slots=slots,
            known=row.between(start, end),
            exact=max(exact - start, 0),
            lent=np.fromiter(row.in_other_rows, dtype=np.int64),
            borrowed=np.fromiter(borrowed, dtype=np.int64),
            references=self.token_to_kv_pool_allocator.references,
            ending=ending,
            needed=needed,
            release=self.token_to_kv_pool_allocator.release_window,
        )
        if is_kept:
            # SGLang frees only what is behind.
            req.kv.cache_protected_len = end
            self.token_to_kv_pool_allocator.release_window(passed)
        return is_kept

    def _release_ending(self, req: Request) -> None:
        """A request needs no longer what it began with behind a continuation: a state or a window."""
        lock = req.lock
        if isinstance(lock, ContinuedLock) and lock.reads_ending:
            lock.reads_ending = False
            self._continuations.unread(lock.parts)

    def evict_sliding_windows(self, req: Request, *where: Any, **named: Any) -> None:
        """Free what the request's window has passed, and leave the window evictable with which it began behind
        a continuation, once the request has freed a slot of its own."""
        super().evict_sliding_windows(req, *where, **named)
        prefix = req.last_node
        if isinstance(prefix, Continued) and self._freed_of_window(req) > prefix.length:
            self._release_ending(req)

    def insert(self, params: Any) -> Any:
        with self._freed.inserting(params.value):
            return super().insert(params)

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        row = self._host_row(kv)
        if row.repaired is not None:
            entries = self.req_to_token_pool.req_to_token[kv.req_pool_idx]
            self.owner.once_more(row.repaired.restore, entries)
            row.repaired = None
        with self._freed.of(row):
            super().free_kv_row(kv, ranges)

    def evictable_size(self) -> int:
        return int(super().evictable_size()) + self._continuations.evictable

    def full_evictable_size(self) -> int:
        return int(super().full_evictable_size()) + self._continuations.evictable

    def protected_size(self) -> int:
        return int(super().protected_size()) + self._continuations.protected

    def full_protected_size(self) -> int:
        return int(super().full_protected_size()) + self._continuations.protected

    def mamba_evictable_size(self) -> int:
        mine = self._continuations.evictable_endings if self.is_mamba_enabled else 0
        return int(super().mamba_evictable_size()) + mine

    def mamba_protected_size(self) -> int:
        mine = self._continuations.protected_endings if self.is_mamba_enabled else 0
        return int(super().mamba_protected_size()) + mine

    def swa_evictable_size(self) -> int:
        mine = self._continuations.evictable_endings if self.is_swa_enabled else 0
        return int(super().swa_evictable_size()) + mine

    def swa_protected_size(self) -> int:
        mine = self._continuations.protected_endings if self.is_swa_enabled else 0
        return int(super().swa_protected_size()) + mine

    @property
    def _of_endings(self) -> tuple[str, str]:
        """SGLang's names for how many endings to evict, and how many were: states, or slots of windows."""
        if self.is_mamba_enabled:
            return "mamba_num", "mamba_num_evicted"
        return "swa_num_tokens", "swa_num_tokens_evicted"

    def evict(self, params: Any) -> Any:
        return self._evict_both(super().evict, params)

    def evict_for_alloc(self, params: Any, **named: Any) -> Any:
        return self._evict_both(super().evict_for_alloc, params, **named)

    def _evict_both(self, evict: Callable[..., Any], params: Any, **named: Any) -> Any:
        """Evict nodes of the core, the least recently used first, each with the continuations of its path: the
        path was used whenever they were. Then evict continuations whose path is locked."""
        mine = self._continuations
        requested, evicted = self._of_endings
        if not len(mine):
            return evict(params, **named)
        if getattr(params, requested) > 0:
            return self._evict_with_endings(evict, params, **named)
        wanted = params.num_tokens
        if wanted <= 0:
            return evict(params, **named)
        freed = endings = 0
        while True:
            # Half of what is missing at a time, because continuations may give the rest.
            left = wanted - freed
            left = max(left // 2, 1) if mine.evictable else left
            result = self._evict_core(evict, dataclasses.replace(params, num_tokens=left), **named)
            endings += getattr(result, evicted)
            freed += result.num_tokens_evicted
            if freed >= wanted or not result.num_tokens_evicted:
                break
        had = mine.evictable_endings
        freed += mine.evict(wanted - freed, self._free_continued)
        endings += had - mine.evictable_endings
        return dataclasses.replace(result, num_tokens_evicted=freed, **{evicted: endings})

    def _evict_core(self, evict: Callable[..., Any], params: Any, **named: Any) -> Any:
        """Evict nodes or endings of the core, and the continuations that go with them. The result counts
        both."""
        mine = self._continuations
        _, evicted = self._of_endings
        had = mine.evictable_endings
        self._freed_before = 0
        result = evict(params, **named)
        slots = mine.drop(self._is_cached, self._free_continued) + self._freed_before
        endings = getattr(result, evicted) + had - mine.evictable_endings
        return dataclasses.replace(
            result, num_tokens_evicted=result.num_tokens_evicted + slots, **{evicted: endings}
        )

    def _evict_with_endings(self, evict: Callable[..., Any], params: Any, **named: Any) -> Any:
        """Evict endings, of continuations and of the core, whichever have more, because neither knows when the
        other's were used. Then slots (:meth:`_evict_both`)."""
        mine = self._continuations
        requested, evicted = self._of_endings
        wanted = getattr(params, requested)
        had = mine.evictable_endings
        core = super().mamba_evictable_size if self.is_mamba_enabled else super().swa_evictable_size
        more = had - int(core())
        slots = mine.evict_endings(min(wanted, max((more + wanted) // 2, 0)), self._free_continued)
        endings = had - mine.evictable_endings
        # What went with the endings counts.
        others = {"num_tokens": max(params.num_tokens - slots, 0), requested: 0}
        result = self._evict_both(evict, dataclasses.replace(params, **others), **named)
        slots += result.num_tokens_evicted
        endings += getattr(result, evicted)
        if endings < wanted:
            left: dict[str, int] = {requested: wanted - endings}
            of_core = self._evict_core(evict, compat.EvictParams(**left))
            slots += of_core.num_tokens_evicted
            endings += getattr(of_core, evicted)
            had = mine.evictable_endings
            slots += mine.evict_endings(wanted - endings, self._free_continued)
            endings += had - mine.evictable_endings
        return dataclasses.replace(result, num_tokens_evicted=slots, **{evicted: endings})

    def _evict_device_leaf(self, node_id: int, *rest: Any) -> Any:
        """SGLang's walks evict KV of full attention only here, or behind this call, whichever the core is."""
        self._continuations.leaves(node_id)
        return super()._evict_device_leaf(node_id, *rest)

    def _is_cached(self, node: int) -> bool:
        try:
            return not self.tree_core.is_full_device_evicted(node)
        except KeyError:  # The tree has no node with this id any more.
            return False

    def _free_continued(
        self, slots: torch.Tensor, known: np.ndarray, ending: torch.Tensor | None
    ) -> int:
        if ending is not None and self.is_mamba_enabled:
            self.req_to_token_pool.mamba_allocator.free(ending)
        elif ending is not None:
            self.token_to_kv_pool_allocator.release_window(ending)
        if not len(known):
            return 0
        allocator = self.token_to_kv_pool_allocator
        return allocator.commit(self.owner.once_more(allocator.prepare_known, slots, known))

    def _free_values(self, *freed: Any) -> None:
        if self._continuations.borrowed:
            # What goes on with the nodes that are freed may name their slots.
            self._freed_before += self._continuations.drop(self._is_cached, self._free_continued)
        with self._freed.of_nodes():
            super()._free_values(*freed)

    def _host_row(self, kv: Any) -> HostRow:
        return self.token_to_kv_pool_allocator.rows.get(kv.req_pool_idx, NOTHING_SHARED)

    def claim_kv_row(self, req: Request) -> bool:
        """SGLang asks whether a session keeps the row of ``req``, before it frees it. Only now do slots still
        have their peers in the window pool."""
        self._window = None
        if self._swaps(req):
            with self.owner.contained_alone():
                self._window = self._window_to_swap(req)
        return bool(super().claim_kv_row(req))

    def on_release(self, req: Request, *, checkpointed: bool) -> None:
        state = None
        window = self._window
        self._window = None
        if self._swaps(req):
            with self.owner.contained_alone():
                state = self._state_to_swap(req)
        super().on_release(req, checkpointed=checkpointed)
        row = self.token_to_kv_pool_allocator.rows.pop(req.kv.req_pool_idx, NOTHING_SHARED)
        if not req.finished():
            self._swap_out(req, row, state, window)
            handover = self.token_to_kv_pool_allocator.handover
            if handover is not None:
                self.owner.once_more(handover.retracted, req, row)
        self.owner.released(req, row)
        if not req.finished() and swapped_of(req) is None:
            # Its prompt is matched again, or computed.
            setattr(req, CONTINUED, None)

    def finish(self, handle: Any, outcome: Any) -> None:
        """SGLang is done with a request that has no row: with a request that waited, it was aborted."""
        super().finish(handle, outcome)
        if outcome != compat.CacheRequestOutcome.SUCCESS:
            swap = self.token_to_kv_pool_allocator.swap
            if swap is not None:
                swap.dropped(handle.rid)
            self.owner.dropped(handle.rid)

    def backup_kv_cache(self, req: Request) -> Any:
        """Copy a request that is being retracted on the decode server of a PD pair. SGLang's host pool copies
        pages of slots, the first slot of a page of positions standing for all. Positions that share may name
        slots of several pages, so such a row is copied slot by slot, into tensors, as by the other backup. None
        if that fails: SGLang then ends the request."""
        if self.page_size == 1 or self._host_row(req.kv).first_shared is None:
            return super().backup_kv_cache(req)
        with self.owner.contained_alone():
            req.offload_kv_cache(self.req_to_token_pool, self.token_to_kv_pool_allocator)
        return req.kv.retraction_backup

    def restore_kv_cache(self, req: Request, backup: Any) -> None:
        if backup.cpu_tensors is None:
            super().restore_kv_cache(req, backup)
        else:
            req.load_kv_cache(self.req_to_token_pool, self.token_to_kv_pool_allocator)

    def discard_kv_cache_backup(self, backup: Any) -> None:
        if backup.cpu_tensors is None:
            super().discard_kv_cache_backup(backup)

    def _state_to_swap(self, req: Request) -> LastState | None:
        """The state with which a request that is being retracted can go on, in models with state layers."""
        if not self.is_mamba_enabled or not req.kv.holds_mamba:
            return None
        length = computed_length(req)
        if not self.enable_mamba_extra_buffer and req.kv.kv_committed_len != length:
            # A step in flight takes the only state further than the tokens that are known.
            return None
        return last_state(self, req, length)

    def _window_to_swap(self, req: Request) -> torch.Tensor | None:
        """The slots in the window pool with which a request that is being retracted can go on, int64 ``[n]``,
        in models with such a pool. None without one, or if some of the last window was freed."""
        if not self.is_swa_enabled:
            return None
        length = computed_length(req)
        length -= length % self.page_size
        first = max(length - self._window_in_pages, 0)
        # Positions before the first one that was freed belong to the tree.
        lowest, end = compat.freed_of_window(req.kv, self.page_size)
        if max(lowest, first) < end:
            return None
        slots = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, first:length].long()
        peers: torch.Tensor = self.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(slots)
        return peers

    def _swaps(self, req: Request) -> bool:
        """Whether the KV of a request that is being retracted may go to the host. Without a prefix cache SGLang
        admits requests that ignore the end of text by a way of their own, which loads nothing."""
        loads = not (self.disable and req.sampling_params.ignore_eos)
        return self.token_to_kv_pool_allocator.swap is not None and not req.finished() and loads

    def _swap_out(
        self,
        req: Request,
        row: HostRow,
        state: LastState | None,
        window: torch.Tensor | None,
    ) -> None:
        """Keep the KV of a request that is retracted. Its slots are free already, but only a later forward
        rewrites them. A request that SGLang ends because it cannot retract it does not come back."""
        swap = self.token_to_kv_pool_allocator.swap
        if (
            swap is None
            or not self._swaps(req)
            or isinstance(req.last_node, Composition)
            or req.to_finish is not None
        ):
            return
        # All ranks admit the same requests with the same numbers of tokens.
        swapped = self.owner.on_all(
            lambda: swap.out(self, req, row, self._first_approximate(req, row), state, window)
        )
        setattr(req, SWAPPED, swapped)

    def init_load_back(self, params: Any) -> Any:
        """Load what a match found on the host: the KV of a retracted request, or a cached prefix."""
        req = params.req
        swapped = swapped_of(req)
        self._loads_swapped = (
            swapped is not None and req.host_hit_length == swapped.length - req.prefix_len
        )
        if not self._loads_swapped:
            return super().init_load_back(params)
        swap = self.token_to_kv_pool_allocator.swap
        assert swap is not None and swapped is not None
        # If nothing is loaded, the KV is computed again.
        setattr(req, SWAPPED, None)
        restored = None
        with self.owner.contained_alone():
            restored = swap.room(self, swapped, req)
        if restored is None:
            return 0, req.last_node
        # Slots are missing on all ranks or on none, but a rank may fail to load.
        if self.owner.on_all(lambda: swap.load(self, swapped, restored, req)) is None:
            self.token_to_kv_pool_allocator.free_restored(restored.slots, restored.in_window)
            return 0, req.last_node
        if swapped.state is not None:
            empty_ring(self, req.kv.mamba_pool_idx.unsqueeze(0))
            req.kv.mamba_cow_src_index = None
            req.kv.mamba_needs_clear = False
        self.owner.restored(len(restored.slots))
        return len(restored.slots), restored._replace(node=req.last_node)

    def prefetch_from_storage(
        self, request: Any, last_host_node_id: Any, *args: Any, **named: Any
    ) -> Any:
        """Load what storage has behind a cached prefix. Behind a continuation nothing is loaded: storage finds
        KV by the hash of the path of the tree, which does not hold the continuation's tokens."""
        if isinstance(last_host_node_id, Continued):
            return None
        return super().prefetch_from_storage(request, last_host_node_id, *args, **named)

    def load_back_is_cache_owned(self) -> bool:
        """Whether the tree owns the slots that :meth:`init_load_back` loaded last."""
        return not self._loads_swapped and super().load_back_is_cache_owned()

    def load_back(self, node_id: Any, mem_quota: int | None = None, req: Any = None) -> bool:
        """Load evicted nodes of a path from the host. Records each slot's position in the path as its cached
        position: the tree holds exact KV only, so the slot's key was rotated for that position."""
        loaded: bool = super().load_back(node_id, mem_quota, req=req)
        if loaded:
            self.owner.once_more(self._path_loaded, node_id, req)
        return loaded

    def _path_loaded(self, node_id: Any, req: Request | None) -> None:
        root = self.root_node_handle(None if req is None else req.extra_key)
        self.owner.path_loaded(self.tree_core.collect_full_device_indices(node_id, root))

    def reads_shifted(self, reqs: Iterable[Request]) -> bool:
        """Whether any of ``reqs`` has a redirected position or a composed prefix. Only such requests may read a
        slot at a position other than the one for which the slot's key was rotated. Asked for each batch, so a
        server that never shared does not look at them."""
        return self.token_to_kv_pool_allocator.has_shifted_slots and any(
            isinstance(req.last_node, Composition)
            or _first_shared(req, self._host_row(req.kv)) is not None
            for req in reqs
        )

    def evicted_of(self, reqs: Sequence[Request]) -> list[int]:
        """Number of evicted positions of each of ``reqs``. The tree holds no evicted positions."""
        if not self.token_to_kv_pool_allocator.has_evicted:
            return [0] * len(reqs)
        return [self._host_row(req.kv).evicted for req in reqs]

    def match_prefix(self, params: Any) -> Any:
        if params.cow_mamba and len(self._continuations):
            with self.owner.contained_alone():
                self._note_use(params)
        result = super().match_prefix(params)
        swapped = swapped_of(params.req)
        # SGLang ends the key of a request that asks for log-probabilities where they begin. They are there: the
        # request was prefilled before it was retracted.
        if swapped is not None and swapped.length > computed_length(params.req):
            # SGLang dropped the tokens behind the prompt.
            setattr(params.req, SWAPPED, None)
            swapped = None
        if swapped is not None and result.device_prefix_len < swapped.length:
            missing = swapped.length - result.device_prefix_len
            return result._replace(
                host_hit_length=missing,
                swa_host_hit_length=min(missing, swapped.in_window),
                swa_branching_seqlen=None,
                mamba_branching_seqlen=None,
            )
        documents = marked(params.req) if self.owner.composes else None
        if documents is not None:
            with self.owner.contained_alone():
                return self._composed(documents, params, result)
            return result
        if swapped is None and params.req is not None and len(self._continuations):
            with self.owner.contained_alone():
                return self._continued(params, result)
        return result

    def _note_use(self, params: Any) -> None:
        """If SGLang will evict a state to give the request a slot, let it not be the state that the request is
        about to begin with."""
        states = self.req_to_token_pool.mamba_allocator
        if not params.req.kv.holds_mamba and not states.available_size():
            exact = not _may_read_approximate(params.req)
            self._continuations.match(params.key, len(params.key), exact)

    def _continued(self, params: Any, result: Any) -> Any:
        """``result``, which the core matched, or a continued prefix if that is longer."""
        held = result.device_prefix_len
        if self.is_mamba_enabled or self.is_swa_enabled:
            # SGLang's prefix ends at the last cached state or window; the tree may have KV behind it.
            held = result.full_kv_hit_length
        usable = result.device_prefix_len + result.host_hit_length
        parts = self._continuations.match(
            params.key, held, exact=not _may_read_approximate(params.req), matched=usable
        )
        if not parts:
            return result
        path = parts[0].node.path
        assert path is not None, "a continued prefix begins on a path of the tree"
        is_shorter = result.device_prefix_len < parts[0].node.start
        prefix = Continued(path.node if is_shorter else result.last_device_node, parts)
        first = prefix.first_approximate
        if first is not None and prefix.length - usable < usable - first:
            # It would make more exact positions approximate than it saves from being computed.
            return result
        if self.most_pairs is not None:
            new = len(params.key) - prefix.length
            if new * prefix.length > self.most_pairs:
                return result
        if (
            params.cow_mamba
            and prefix.ending is not None
            and not begin_with(self, params.req, prefix)
        ):
            return result
        nodes = dict.fromkeys(("last_device_node", "last_host_node", "best_match_node"), prefix)
        return result._replace(
            device_prefix_len=prefix.length,
            host_hit_length=0,
            swa_host_hit_length=0,
            swa_branching_seqlen=None,
            mamba_branching_seqlen=None,
            **nodes,
        )

    def _composed(self, documents: CachedDocuments, params: Any, result: Any) -> Any:
        """``result``, which the tree matched, or a composed prefix if that is longer."""
        prefix = documents.compose(params.key, super().match_prefix, self.tree_core)
        if prefix is None:
            return result
        allocator = self.token_to_kv_pool_allocator
        prefix.again = allocator.repairs.choose(params.req, prefix, self.owner.ranks)
        if prefix.kept <= result.device_prefix_len:
            return result
        allocator.has_shifted_slots = True
        nodes = dict.fromkeys(("last_device_node", "last_host_node", "best_match_node"), prefix)
        return result._replace(device_prefix_len=prefix.kept, **nodes)

    def prefix_device_indices(self, req: Request) -> torch.Tensor:
        prefix = req.last_node
        # The request is about to be computed: a copy that was not loaded is of no use.
        setattr(req, SWAPPED, None)
        if isinstance(prefix, Restored):
            root = self.root_node_handle(req.extra_key)
            path = self.tree_core.collect_full_device_indices(prefix.node, root)
            slots = torch.cat((path[: req.prefix_len - len(prefix.slots)], prefix.slots))
            assert len(slots) == req.prefix_len, (len(slots), req.prefix_len)
            if self.is_swa_enabled and prefix.in_window < len(prefix.slots):
                # The positions before the last window have no slots there.
                compat.set_freed_of_window(req.kv, req.prefix_len - prefix.in_window)
            return slots
        setattr(req, CONTINUED, None)
        if isinstance(prefix, Continued):
            root = self.root_node_handle(req.extra_key)
            path = self.tree_core.collect_full_device_indices(int(prefix), root)
            if prefix.first_approximate is not None:
                setattr(req, CONTINUED, (prefix.first_approximate, prefix.length))
                self.owner.continued(prefix.length - prefix.first_approximate)
            return prefix.slots(path)
        if not isinstance(prefix, Composition):
            return super().prefix_device_indices(req)
        root = self.root_node_handle(req.extra_key)
        slots = prefix.slots(lambda node: self.tree_core.collect_full_device_indices(node, root))
        assert len(slots) == prefix.length, (len(slots), prefix.length)
        if len(prefix.again):
            prefix.repaired = RepairedRow(slots, prefix.kept)
        self.owner.composed(
            documents=len(prefix.nodes),
            tokens=prefix.kept,
            repaired=len(prefix.again),
            missed=missed(req, prefix),
        )
        return slots[: req.prefix_len]

    def lock(self, *where: Any, **named: Any) -> Any:
        """Lock the path of a node, all paths of a composition, or a path and its continuations."""
        if where and isinstance(where[0], Restored):
            where = where[0].node, *where[1:]
        if where and isinstance(where[0], Composition):
            return CompositionLock(map(super().lock, where[0].nodes))
        if where and isinstance(where[0], Continued):
            prefix = where[0]
            if prefix.ending is not None:
                # Of all states and windows, the request needs only the one that it begins with.
                kind = (
                    compat.ComponentType.MAMBA
                    if self.is_mamba_enabled
                    else compat.ComponentType.SWA
                )
                named["skip_lock_components"] = (kind,)
            lock = super().lock(int(prefix), *where[1:], **named)
            assert lock is not None, "a continued prefix begins on a path of the tree"
            reads = self._continuations.pin(prefix.parts)
            return ContinuedLock(lock.node, lock.receipt, parts=prefix.parts, reads_ending=reads)
        return super().lock(*where, **named)

    def unlock(self, lock: Any) -> None:
        if isinstance(lock, ContinuedLock):
            if lock.reads_ending:
                self._continuations.unread(lock.parts)
            self._continuations.unpin(lock.parts)
        for each in lock if isinstance(lock, CompositionLock) else [lock]:
            super().unlock(each)


def _first_shared(req: Request, row: HostRow) -> int | None:
    """The lowest position of a request that was ever redirected, in ``row``, before the request was swapped out
    or in a continuation. From there on its KV is approximate. None if all is exact."""
    positions = [row.first_shared]
    if isinstance(req.last_node, Restored):
        positions.append(req.last_node.first_shared)
    if isinstance(req.last_node, Continued):
        positions.append(req.last_node.first_approximate)
    return min((first for first in positions if first is not None), default=None)


def _may_read_approximate(req: Request) -> bool:
    """Whether a request may read what other requests shared. Its log-probabilities of prompt tokens, its hidden
    states and its scores must be exact."""
    asks_prompt = req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids)
    needs_exact = asks_prompt or req.return_hidden_states or only_scores(req)
    return takes_part(req) and not needs_exact
