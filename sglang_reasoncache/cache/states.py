# SPDX-License-Identifier: Apache-2.0
"""Hands states of state layers (such as Mamba) from finished requests to continuations, and from there to new
requests.

SGLang gives a request a slot of its own in a pool of states. Forward passes change the state in place, so a
cached state is copied before a request goes on with it. SGLang's tree keeps states of exact prefixes; the
state behind KV that was shared belongs to a continuation (``continuations.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.compat.types import Request

if TYPE_CHECKING:
    from sglang_reasoncache.cache.tree import SharedRadixCache


class LastState(NamedTuple):
    """The last state of a finished request that SGLang could keep.

    Attributes:
        length: Number of positions that it has seen.
        slot: Its slot in the pool of states, int64 ``[1]`` on the device.
        component: What keeps states in SGLang's tree.
        params: What ``component`` prepared.
    """

    length: int
    slot: torch.Tensor
    component: Any
    params: Any

    def release_others(self, req: Request) -> None:
        """Free all slots of the request in the pool of states, except this one."""
        inserted = compat.InsertResult(prefix_len=0)
        self.component.cleanup_after_caching_req(
            req, is_finished=True, insert_result=inserted, insert_params=self.params
        )


def last_state(tree: SharedRadixCache, req: Request, up_to: int) -> LastState | None:
    """The state that SGLang itself would publish with the first ``up_to`` positions of a finished request. None
    if there is none: SGLang may have copied no state yet."""
    component = tree.components[compat.ComponentType.MAMBA]
    params = compat.InsertParams()
    length = component.prepare_for_caching_req(
        req=req, insert_params=params, token_ids_len=up_to, is_finished=True
    )
    if not length or params.mamba_value is None or length % tree.page_size:
        return None
    return LastState(length, params.mamba_value, component, params)


def begin_with(tree: SharedRadixCache, req: Request, prefix: Any) -> bool:
    """Let ``req`` begin with a copy of the state after ``prefix``, which the next forward makes. False if the
    request needs a slot for the copy and there is none."""
    if not take_slot(tree, req, prefix):
        return False
    req.kv.mamba_cow_src_index = prefix.ending
    req.kv.mamba_needs_clear = False
    return True


def take_slot(tree: SharedRadixCache, req: Request, prefix: Any) -> bool:
    """Give ``req`` a slot in the pool of states, if it has none. The next forward clears a new slot. False if
    there is no slot. ``prefix``: what is not evicted to make room."""
    if req.kv.holds_mamba:
        return True
    states = tree.req_to_token_pool.mamba_allocator
    slot = states.alloc(1)
    if slot is None:
        lock = tree.lock(prefix)
        try:
            tree.evict_for_alloc(compat.EvictParams(num_tokens=0, mamba_num=1))
        finally:
            tree.unlock(lock)
        slot = states.alloc(1)
    if slot is None:
        return False
    req.kv.mamba_pool_idx = slot[0]
    req.kv.mamba_needs_clear = True
    empty_ring(tree, slot)
    return True


def empty_ring(tree: SharedRadixCache, slot: torch.Tensor) -> None:
    """With ``--enable-linear-replayssm`` SGLang keeps each state's newest tokens in a ring beside it. ``slot``,
    int64 ``[1]``, gets another state: the ring holds none of its tokens."""
    pool = tree.req_to_token_pool
    write_pos = pool.mamba_pool.replayssm_write_pos
    if write_pos is not None:
        # An assignment would copy the 0 from host memory, and so wait for the device.
        write_pos.index_fill_(0, pool.translate_mamba_indices(slot), 0)
