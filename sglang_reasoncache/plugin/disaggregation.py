# SPDX-License-Identifier: Apache-2.0
"""Admission on the decode server of a PD pair.

There a request is admitted before its prompt's KV is transferred, and SGLang's queue for that asks no prefill
budget (``cache/admission.py``): it reserves ``--num-reserved-decode-tokens`` slots for the output of each
request, which this module lowers to what was learned, and allocates without evicting. Slots that the ledger
could free count as slots for output only. What they are worth beyond that is reclaimed before SGLang decides,
because a prompt's slots must be free."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import MOST_AT_ONCE
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.owner import NOTHING_PROMISED, Promise
from sglang_reasoncache.compat.types import PreallocQueue


class Admits(Protocol):
    """Whom this class asks: the plugin's ``Controller``, or what replaces it where nothing is shared.

    Attributes:
        steps: Number of decode steps so far.
    """

    @property
    def steps(self) -> int: ...

    def promise(self) -> Promise: ...

    def request_waits(self, again: bool) -> None: ...


class PreallocAdmission:
    """Hooks around the methods by which ``DecodePreallocQueue`` decides. All ranks decide alike, because their
    queues are equal and so are the decode steps after which this class asks for a new promise."""

    def __init__(self, controller: Admits) -> None:
        self._controller = controller
        self._promise = NOTHING_PROMISED
        self._promised_at = -1
        # How many slots of the ledger are worth more than the reserve for output.
        self._surplus = 0
        # How many slots the request that is checked next must have at once, and how many it must find. None:
        # SGLang did not say.
        self._prompt: int | None = None
        self._required: Callable[[], int] | None = None
        # The operator's --num-reserved-decode-tokens. None until SGLang asks first.
        self._most: int | None = None
        # How many requests SGLang has admitted in this pass.
        self._extra = 0
        # Passes in which ``after_queue`` might have asked for arrived prompts, as SGLang counts its own.
        self._passes = 0

    def around_budget(
        self,
        stock: Callable[..., int],
        queue: PreallocQueue,
        retractable_tokens: int | None = None,
        count_retracted: bool = True,
        extra_reserved_reqs: int = 0,
        reserved_tokens: int | None = None,
        **others: Any,
    ) -> int:
        """How many slots SGLang may give to requests: those it has, minus a reserve for output. The reserve is
        the learned one (``sharing/headroom.py``), at most SGLang's, and slots of the ledger count for it. So
        the result never exceeds the slots that are free or evictable. By as much as SGLang would reserve more,
        requests may have to be retracted later: new ones are admitted only if there is room for the copies."""
        retractable_tokens = _without_saved(queue, retractable_tokens)
        self._surplus = 0
        # SGLang asks with ``count_retracted`` for new requests, without for those that come back.
        if queue.queue if count_retracted else queue.retracted_queue:
            self._extra = extra_reserved_reqs
            promise = self._promised(queue, comes_back=not count_retracted)
            kept = queue._active_reserved_tokens(extra_reserved_reqs=extra_reserved_reqs)
            reserved_tokens = max(kept - promise.shareable, 0)
            # SGLang reserves at least this, so that the longest running request can always finish. It is below
            # 0 where the tokens of the other requests are more than enough. Each slot that is shared raises it
            # by one, because retracting the others then frees one less.
            least = queue._need_space_for_single_req(retractable_tokens)
            beside = retractable_tokens is not None and queue.scheduler.running_batch.reqs
            room = -least if beside else promise.shareable
            self._surplus = max(min(promise.shareable - kept, room), 0)
        return stock(
            queue,
            retractable_tokens=retractable_tokens,
            count_retracted=count_retracted,
            extra_reserved_reqs=extra_reserved_reqs,
            reserved_tokens=reserved_tokens,
            **others,
        )

    def around_required(
        self,
        stock: Callable[..., int],
        queue: PreallocQueue,
        req: Any,
        allocated_tokens: int,
        prefix_len: int,
        retractable_tokens: int,
    ) -> int:
        """How many slots a new request must find: its prompt's and some for its output, and as many as it needs
        to finish if all others are retracted."""
        self._prompt = allocated_tokens
        self._promised(queue, length=prefix_len + allocated_tokens)
        self._required = lambda: stock(
            queue, req, allocated_tokens, prefix_len, _without_saved(queue, retractable_tokens)
        )
        return self._required()

    def around_fits(
        self,
        stock: Callable[..., bool],
        queue: PreallocQueue,
        full_tokens: int,
        swa_tokens: int,
        *,
        full_allocatable_tokens: int,
        swa_allocatable_tokens: int | None,
    ) -> bool:
        """Whether a request fits. If that makes it fit, running requests share first, as much as its prompt
        lacks: slots of the ledger count for the rest."""
        allocator = queue.token_to_kv_pool_allocator
        short = full_tokens - full_allocatable_tokens
        prompt = self._prompt
        required = self._required
        self._prompt = self._required = None
        if 0 < short <= self._surplus:
            # Where windows have a pool of their own and no budget, a request takes as many slots of either
            # pool, so only what both have counts.
            counted = (
                allocator.available_size if swa_allocatable_tokens is None else allocator.free_size
            )
            there = counted()
            cached = 0
            if compat.get_disagg().disaggregation_decode_enable_radix_cache:
                cached = queue._radix_full_evictable()
            lacking = short if prompt is None else prompt - there - cached
            freed = 0
            if lacking > 0:
                free = allocator.free_size()
                allocator.reclaim_to(free + min(lacking, MOST_AT_ONCE), evicts=False)
                freed = counted() - there
                self._promised_at = -1
                if required is not None:
                    # Retracting all others frees less now.
                    full_tokens = max(full_tokens, required())
            added = short if freed >= lacking else freed
            full_allocatable_tokens += added
            self._surplus -= min(added, self._surplus)
        fits = stock(
            queue,
            full_tokens,
            swa_tokens,
            full_allocatable_tokens=full_allocatable_tokens,
            swa_allocatable_tokens=swa_allocatable_tokens,
        )
        if not fits:
            self._controller.request_waits(again=False)
        return fits

    def after_queue(self, scheduler: Any) -> None:
        """Let requests run whose prompts have arrived. While a retracted request waits, SGLang admits no other,
        as it should, but does not ask for these either: they would hold slots and decode nothing. If nothing
        runs and more were admitted than SGLang would admit, it would wait for ever. All ranks call this
        together, and their queues are equal."""
        queue = scheduler.disagg_decode_prealloc_queue
        if not queue.retracted_queue:
            return
        idle = not scheduler.running_batch.reqs and not scheduler.waiting_queue
        if idle or self._promise_now(queue) is not NOTHING_PROMISED:
            interval = compat.get_disagg().disaggregation_decode_polling_interval
            self._passes = (self._passes + 1) % interval
            if self._passes:
                return
            arrived = scheduler.disagg_decode_transfer_queue.pop_transferred()
            scheduler.waiting_queue.extend(arrived)

    def _promised(self, queue: PreallocQueue, comes_back: bool = False, length: int = 0) -> Promise:
        """What admission may count on; sets SGLang's reserve for the output of a request to it. ``comes_back``:
        whether SGLang asks for requests that were retracted, which make room on the host. ``length``: that of
        the request that SGLang checks."""
        if self._most is None:
            self._most = queue.num_reserved_decode_tokens
        promise = self._promise_now(queue)
        reserved = promise.reserved(self._most, 1)
        if not comes_back:
            reserved = max(reserved, _least_reserve(queue, self._most, self._extra, length))
        elif not queue._active_req_count(self._extra):
            # Nothing else will ever free a slot. A request that shared may be nearly as long as the pool.
            reserved = min(reserved, 1)
        queue.num_reserved_decode_tokens = math.ceil(reserved)
        return promise

    def _promise_now(self, queue: PreallocQueue) -> Promise:
        """What admission may count on, asked once after each decode step. Nothing where SGLang ends each
        request that it retracts, and where SGLang's own reserve is all that keeps slots in the window pool."""
        if self._promised_at != self._controller.steps:
            self._promised_at = self._controller.steps
            self._promise = self._controller.promise()
        can = _retracts(queue) and not _overlooks_windows(queue)
        return self._promise if can else NOTHING_PROMISED


def _without_saved(queue: PreallocQueue, tokens: int | None) -> int | None:
    """The slots that retracting all requests frees, where SGLang counts ``tokens`` positions of requests."""
    if tokens is None:
        return None
    # SGLang's own allocator saves nothing.
    return max(tokens - getattr(queue.token_to_kv_pool_allocator, "saved", 0), 0)


def _overlooks_windows(queue: PreallocQueue) -> bool:
    """Whether SGLang may admit a request for which the window pool has too few slots: it counts cached slots of
    the other pool, which it can evict, but allocates as many of either. If that fails, the scheduler ends."""
    allocator = queue.token_to_kv_pool_allocator
    return (
        isinstance(allocator.get_kvcache(), compat.SWAKVPool)
        and allocator.page_size == 1
        and bool(compat.get_disagg().disaggregation_decode_enable_radix_cache)
    )


def states_run_ahead(pool: Any) -> bool:
    """Whether SGLang copies wrong states when it retracts requests on the decode server of a PD pair: with
    state layers and the overlap schedule, the forward in flight takes a state one token further than the tokens
    that SGLang keeps. It feeds that token again."""
    has_states = isinstance(pool, compat.HybridLinearKVPool)
    return has_states and not compat.get_schedule().disable_overlap_schedule


def _retracts(queue: PreallocQueue) -> bool:
    """Whether SGLang can copy a request that it retracts. If not, it ends the request, or goes on with a wrong
    state (:func:`states_run_ahead`)."""
    backup = compat.get_disagg().disaggregation_decode_retraction_backup
    pool = queue.token_to_kv_pool_allocator.get_kvcache()
    if states_run_ahead(pool):
        return False
    # It makes no tensors of other pools.
    in_tensors = isinstance(
        pool,
        compat.MHATokenToKVPool
        | compat.MLATokenToKVPool
        | compat.HybridLinearKVPool
        | compat.SWAKVPool,
    )
    return backup == "host_pool" or (backup == "cpu_tensor" and in_tensors)


def _least_reserve(queue: PreallocQueue, most: int, admitted: int, length: int) -> float:
    """How many slots to reserve at least for the output of each request, so that what all leave out of ``most``
    can be copied to the host: at most half of the room there, because a request that shares frees fewer slots
    than its copy takes. 0 if copies have no limit.

    A copy is a request whole, so room for the longest one, which may grow by ``most``, is left out.
    ``admitted``: how many requests SGLang has admitted in this pass. ``length``: see ``_promised``."""
    if compat.get_disagg().disaggregation_decode_retraction_backup != "host_pool":
        return 0
    # Windows have a host pool of their own. SGLang's own allocator has no handover.
    pools = [entry.host_pool for entry in queue.tree_cache.host_pool_group.entry_map.values()]
    handover: Handover | None = getattr(queue.token_to_kv_pool_allocator, "handover", None)
    places = [min(pool.available_size() for pool in pools)]
    if handover is not None:
        places.append(handover.room)
    scheduler = queue.scheduler
    batch = scheduler.last_batch
    # In no queue.
    taken = batch.reqs if batch and batch.forward_mode.is_prebuilt() else []
    coming = [decode_req.req for decode_req in queue.transfer_queue.queue]
    reqs = [*scheduler.running_batch.reqs, *scheduler.waiting_queue, *coming, *taken]
    longest = max([length, *(req.seqlen for req in reqs)]) + most
    room = sum(max(place - longest, 0) for place in places) // 2
    # The request that SGLang checks counts, too.
    return most - room / (queue._active_req_count(admitted) + 1 + len(taken))
