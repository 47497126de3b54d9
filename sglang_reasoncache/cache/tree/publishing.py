# SPDX-License-Identifier: Apache-2.0
"""Publishes rows: exact KV into SGLang's tree core, what is behind as a continuation."""

from typing import Any

import numpy as np
import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.composition import Composition
from sglang_reasoncache.cache.continuation import Continued
from sglang_reasoncache.cache.states import LastState, last_state
from sglang_reasoncache.cache.swap import Restored
from sglang_reasoncache.cache.tree.base import ContinuedLock
from sglang_reasoncache.cache.tree.evicting import EvictsContinuations
from sglang_reasoncache.compat.types import Request


class Publishes(EvictsContinuations):
    """A prefix cache into which rows that share slots are published."""

    def checkpoint_into_tree(self, req: Request, *, up_to: int, **kwargs: Any) -> None:
        """Publish the row of ``req``, at most up to ``up_to`` (:meth:`_publishable`). If that method fails,
        nothing is published. All our code that may fail runs before the tree changes.

        A running request publishes only its prompt, because positions that the tree owns cannot be redirected.
        If a policy may evict positions of the prompt, a running request publishes nothing.
        """
        running = not req.finished()
        self._note_restored(req, running)
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
        if isinstance(req.last_node, Composition | Continued):
            # KV behind a document used at a new position is not exact, and the core holds exact KV only. Nor
            # does the core have the path that a continuation belongs to.
            end = 0
            publishes = publishes and not (running and self.is_mamba_enabled)
        if publishes:
            if self.tree_core.is_eagle and 0 < end < up_to:
                # Keys are pairs of tokens: that of the last position has the token at ``end``, too, but nothing
                # of its KV. Without it SGLang would fail if the tree already owned all positions before.
                # With state layers SGLang's keys are no pairs.
                end += 1
            with self._freed.of(self._host_row(req.kv)):
                super().checkpoint_into_tree(req, up_to=end, **kwargs)
        if continues and not self.is_mamba_enabled:
            with self.owner.contained_alone():
                self._continue(req, up_to)
        if self.is_swa_enabled and not self.disable and running and end < up_to:
            # Admission expects the slots of passed windows to be free. The call above stopped at ``end``.
            self.evict_sliding_windows(req, up_to - 1)

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

    def _note_restored(self, req: Request, running: bool) -> None:
        """Record in the host's copy of a restored row what is approximate, before publishing puts a node in
        the place of ``Restored``. One that was restored behind a continuation goes on as if it had computed
        what was restored."""
        restored = req.last_node
        if not isinstance(restored, Restored):
            return
        goes_on = isinstance(restored.node, Continued)
        if running or goes_on:
            first = self._first_approximate(req, self._host_row(req.kv))
            if first is not None:
                self.token_to_kv_pool_allocator.row_of(req.kv.req_pool_idx).first_shared = first
        if goes_on:
            req.last_node = restored.node

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
            if prefix is None:
                self._continuations.drop_contained(self._free_continued)
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
