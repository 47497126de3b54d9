# SPDX-License-Identifier: Apache-2.0
"""Admission on the decode server of a PD pair.

There a request is admitted before its prompt's KV is transferred, and SGLang's queue for that asks no prefill
budget (``cache/admission.py``): it reserves ``--num-reserved-decode-tokens`` slots for the output of each
request, and allocates without evicting. So the slots of a prompt are reclaimed here, before SGLang decides.
Slots that the ledger could free count only as slots for output."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_reasoncache.compat.types import PreallocQueue

if TYPE_CHECKING:
    from sglang_reasoncache.cache.owner import Promise
    from sglang_reasoncache.plugin.controller import Controller


def around_budget(
    controller: Controller,
    stock: Callable[..., int],
    queue: PreallocQueue,
    retractable_tokens: int | None = None,
    count_retracted: bool = True,
    extra_reserved_reqs: int = 0,
    reserved_tokens: int | None = None,
    **others: Any,
) -> int:
    """How many slots SGLang may give to requests: those it has, minus a reserve for output. The reserve is the
    learned one (``sharing/headroom.py``), at most SGLang's, and slots of the ledger count for it. So the result
    never exceeds the slots that are free or evictable."""
    retractable_tokens = without_saved(queue, retractable_tokens)
    active = queue._active_req_count(extra_reserved_reqs)
    if reserved_tokens is None:
        reserved_tokens = queue.num_reserved_decode_tokens * active
    if queue.queue or queue.retracted_queue:
        # No request needs the reserve that SGLang keeps so that the longest running one can always finish.
        least = queue._need_space_for_single_req(retractable_tokens)
        reserved_tokens = max(reserve(controller.promise(), reserved_tokens, active), least)
    return stock(
        queue,
        retractable_tokens=retractable_tokens,
        count_retracted=count_retracted,
        extra_reserved_reqs=extra_reserved_reqs,
        reserved_tokens=reserved_tokens,
        **others,
    )


def reserve(promise: Promise, tokens: int, requests: int) -> int:
    """How many slots to reserve for the output of ``requests`` for which SGLang would reserve ``tokens``."""
    learned = max(min(tokens, promise.ahead * requests), tokens * promise.kept)
    return max(int(learned) - promise.shareable, 0)


def around_required(
    _controller: Controller,
    stock: Callable[..., int],
    queue: PreallocQueue,
    req: Any,
    allocated_tokens: int,
    prefix_len: int,
    retractable_tokens: int,
) -> int:
    """How many slots a request must find: its prompt's, and so many that it can finish if all others are
    retracted."""
    left = without_saved(queue, retractable_tokens)
    return stock(queue, req, allocated_tokens, prefix_len, left)


def without_saved(queue: PreallocQueue, tokens: int | None) -> int | None:
    """The slots that retracting all requests frees, where SGLang counts ``tokens`` positions of requests."""
    if tokens is None:
        return None
    return max(tokens - queue.token_to_kv_pool_allocator.saved, 0)


def around_fits(
    controller: Controller,
    stock: Callable[..., bool],
    queue: PreallocQueue,
    full_tokens: int,
    swa_tokens: int,
    *,
    full_allocatable_tokens: int,
    swa_allocatable_tokens: int | None,
) -> bool:
    """Whether a request fits. If slots are missing, running requests share first."""
    allocator = queue.token_to_kv_pool_allocator
    short = full_tokens - full_allocatable_tokens
    if short > 0:
        free = allocator.free_size()
        allocator.reclaim_to(free + short, evicts=False)
        full_allocatable_tokens += allocator.free_size() - free
    fits = stock(
        queue,
        full_tokens,
        swa_tokens,
        full_allocatable_tokens=full_allocatable_tokens,
        swa_allocatable_tokens=swa_allocatable_tokens,
    )
    if not fits:
        controller.request_waits(again=False)
    return fits
