# SPDX-License-Identifier: Apache-2.0
"""Keeps KV of retracted requests on the host (``swap.py``), and tells the owner of rows that are freed."""

from collections.abc import Sequence
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.composition import Composition
from sglang_reasoncache.cache.continuation import Continued
from sglang_reasoncache.cache.freed import NOTHING_SHARED
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.states import LastState, empty_ring, last_state
from sglang_reasoncache.cache.swap import computed_length, swapped_of
from sglang_reasoncache.cache.tree.publishing import Publishes
from sglang_reasoncache.compat.carriers import CONTINUED, SWAPPED
from sglang_reasoncache.compat.types import Request


class SwapsOut(Publishes):
    """A prefix cache that copies retracted requests to the host."""

    #: Whether the slots that were loaded last belong to a request.
    _loads_swapped = False
    #: What :meth:`_window_to_swap` found for the request whose row is being freed.
    _window: torch.Tensor | None = None
    #: What :meth:`Handover.drafts_of` copied of that request.
    _drafts: Sequence[Any] = ()

    def claim_kv_row(self, req: Request) -> bool:
        """SGLang asks whether a session keeps the row of ``req``, before it frees it. Only now do slots still
        have their peers in the window pool."""
        self._window = None
        self._drafts = ()
        if self._swaps(req):
            with self.owner.contained_alone():
                self._window = self._window_to_swap(req)
        handover = self.token_to_kv_pool_allocator.handover
        if handover is not None and not req.finished():
            with self.owner.contained_alone():
                self._drafts = handover.drafts_of(req)
        self._keep_chunks(req)
        return bool(super().claim_kv_row(req))

    def _keep_chunks(self, req: Request) -> None:
        """Keep what was computed of a prompt behind a continuation, if the request is aborted between two
        chunks. SGLang's tree has the chunks of other prompts. A client that tries again goes on from there."""
        if (
            self.token_to_kv_pool_allocator.continues
            and isinstance(req.last_node, Continued)
            and req.finished()
            and not req.output_ids
            and not req.skip_radix_cache_insert
            and not self.is_mamba_enabled
        ):
            with self.owner.contained_alone():
                self._continue(req, req.prefix_len)

    def on_release(self, req: Request, *, checkpointed: bool) -> None:
        state = None
        window = self._window
        drafts = self._drafts
        self._window = None
        self._drafts = ()
        if self._swaps(req):
            with self.owner.contained_alone():
                state = self._state_to_swap(req)
        super().on_release(req, checkpointed=checkpointed)
        row = self.token_to_kv_pool_allocator.rows.pop(req.kv.req_pool_idx, NOTHING_SHARED)
        if not req.finished():
            self._swap_out(req, row, state, window)
            handover = self.token_to_kv_pool_allocator.handover
            if handover is not None:
                self.owner.once_more(handover.retracted, req, row, drafts)
        self.owner.released(req, row)
        if not req.finished() and swapped_of(req) is None:
            # Its prompt is matched again, or computed.
            setattr(req, CONTINUED, None)

    def finish(self, handle: Any, outcome: Any) -> None:
        """SGLang is done with a request outside the running batch: it may have aborted the request, whose row,
        if there is one, it frees before or after this."""
        super().finish(handle, outcome)
        if outcome != compat.CacheRequestOutcome.SUCCESS:
            self.owner.dropped(handle)

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
            or swap.rests
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

    def load_back_is_cache_owned(self) -> bool:
        """Whether the tree owns the slots that :meth:`init_load_back` loaded last."""
        return not self._loads_swapped and super().load_back_is_cache_owned()

    def backup_kv_cache(self, req: Request) -> Any:
        """Copy a request that is being retracted on the decode server of a PD pair: to SGLang's host pool or,
        if that is full, into tensors, as by the other backup. None if neither has room, or if a copy fails:
        SGLang then ends the request.

        The host pool copies pages of slots, the first slot of a page of positions standing for all. Positions
        that share may name slots of several pages, so such a row is always copied slot by slot."""
        handover = self._handover
        by_pages = self.page_size == 1 or self._host_row(req.kv).first_shared is None
        if by_pages:
            backup = super().backup_kv_cache(req)
            if backup is not None or computed_length(req) > handover.room:
                return backup
        handover.make_room(computed_length(req))
        with self.owner.contained_alone():
            req.offload_kv_cache(self.req_to_token_pool, self.token_to_kv_pool_allocator)
        backup = req.kv.retraction_backup
        if backup is not None:
            handover.copied(backup, computed_length(req))
        return backup

    def restore_kv_cache(self, req: Request, backup: Any) -> None:
        if backup.cpu_tensors is None:
            super().restore_kv_cache(req, backup)
        else:
            req.load_kv_cache(self.req_to_token_pool, self.token_to_kv_pool_allocator)
            self.discard_kv_cache_backup(backup)
            self.owner.restored(computed_length(req))

    def discard_kv_cache_backup(self, backup: Any) -> None:
        if backup.cpu_tensors is None:
            super().discard_kv_cache_backup(backup)
        else:
            self._handover.dropped(backup)

    @property
    def _handover(self) -> Handover:
        """That of a decode server of a PD pair."""
        handover = self.token_to_kv_pool_allocator.handover
        assert handover is not None, "SGLang copies retracted requests on such servers only"
        return handover
