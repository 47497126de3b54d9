# SPDX-License-Identifier: Apache-2.0
"""Asks the evicting policies about one request at a time, and evicts the positions that the policies choose."""

import dataclasses
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.cache.host_row import EVICTED, HostRow
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.eviction.policies.contract import NamedPolicy, View, whole
from sglang_reasoncache.eviction.policies.evictor import ALWAYS, BETWEEN_POLLS, Evictor, runs
from sglang_reasoncache.eviction.row_state import (
    Decision,
    EvictionStats,
    RowState,
    Totals,
    check_shape,
    written_positions,
)

#: ``GET /reasoncache/details`` lists at most this many runs of evicted positions per request.
_REMEMBERED = 1024


class EvictionController:
    """Lets policies choose positions, and evicts the chosen positions. Each scheduler has one controller.

    Policies act in the order in which they are given: those with ``when=always`` at every poll, those
    with ``when=short`` when :meth:`give` is called.

    Args:
        rows: SGLang's ``ReqToTokenPool``. The *row* of a request holds the slot of each of its positions.
        source: Reads the keys and queries for policies.
        stats: Counts what is evicted.
        ranks: The tensor-parallel ranks, which all ask about the same requests in the same order.

    Attributes:
        described: Name and options of every policy, for ``GET /reasoncache``.
        is_active: Whether there is a policy.
        evicts_prompts: Whether a policy may evict positions of prompts. If so, the prompt of a request enters
            the prefix tree only when the request finishes.
        waits: Whether a policy has ``when=short``.
    """

    def __init__(
        self,
        evictors: Sequence[NamedPolicy],
        allocator: Any,
        rows: ReqToTokenPool,
        source: KeySource,
        stats: EvictionStats,
        ranks: Ranks,
    ) -> None:
        self._evictors = evictors
        self._allocator = allocator
        self._page = allocator.page_size
        self._rows = rows
        self._source = source
        self._stats = stats
        self._ranks = ranks
        self.described = [{"name": name, **dataclasses.asdict(policy)} for name, policy in evictors]
        self.is_active = bool(evictors)
        self.waits = any(policy.when != ALWAYS for _, policy in evictors)
        self.evicts_prompts = any(policy.prompt for _, policy in evictors)

    @property
    def positions_now(self) -> int:
        """Number of evicted positions of all running requests."""
        return int(self._allocator.evicted)

    def poll(
        self,
        req: Request,
        state: RowState,
        written: int | None = None,
        decide: bool = True,
        begin: bool = True,
    ) -> None:
        """Evict again the positions that were evicted before a retraction, then those that policies choose now.

        Args:
            req: A request that holds its row.
            state: The request's state, in which this method records what was evicted.
            written: Number of positions whose KV is written; None means :func:`written_positions`.
            decide: Whether to ask the policies.
            begin: Whether they may begin to decide, or only carry out what they decided before.
        """
        if written is None:
            written = written_positions(req)
        if len(state.again):
            # Policies are asked afterwards: since the retraction the row has slots for these positions again.
            self._evict_again(req, state, written)
        for name, policy in self._evictors if decide else ():
            decision = state.decisions.pop(name, None)
            if decision is None and begin and policy.when == ALWAYS:
                decision = self._decided(name, policy, req, state, written)
            if decision is None:
                if policy.accumulates:
                    self._count_queries(name, policy, req, state, written)
            elif decision.is_immediate or self._ranks.least(decision.ready()):
                view = self._view(policy, req, state, written)
                most = policy.excess(view, self._slots(req, written))
                self._apply(req, state, decision.positions(self._ranks, most), written)
            else:
                state.decisions[name] = decision

    def give(self, req: Request, state: RowState, wanted: int) -> None:
        """Have policies with ``when=short`` evict positions of ``req``. SGLang lacks ``wanted`` slots and would
        otherwise retract a request.

        A policy frees at most the slots above the policy's budget. If fewer than ``slack`` slots are wanted, a
        policy frees ``slack`` slots, because a shortage returns with every decode step. For the same reason a
        policy is not asked about a request with at most ``slack`` slots above the budget. A policy that frees
        fewer slots than asked is not asked again before ``slack`` new positions are written. So in a lasting
        shortage, scores are computed once per ``slack`` freed slots or new positions. On a GPU the host waits
        for the forward in flight and the scores, because recomputing a retracted request takes far longer.
        """
        written = written_positions(req)
        for name, policy in self._evictors:
            if policy.when == ALWAYS or wanted <= 0:
                continue
            most = max(wanted, policy.slack)
            decision = self._decided(name, policy, req, state, written, most)
            if decision is None:
                continue
            freed = self._apply(req, state, decision.positions(self._ranks), written)
            wanted -= freed
            if freed >= most:
                del state.next_eviction[name]

    def _decided(
        self,
        name: str,
        policy: Evictor,
        req: Request,
        state: RowState,
        written: int,
        most: int | None = None,
    ) -> Decision | None:
        """A decision to free the request's slots above the budget, but at most ``most`` slots.

        Returns None if at most ``slack`` slots are above the budget, if ``state.next_eviction`` asks for more
        written positions first, or if no position may be evicted.
        """
        slots = self._slots(req, written)
        if slots - policy.allowed(written) <= policy.slack or written < state.next_eviction.get(
            name, 0
        ):
            return None
        state.next_eviction[name] = written + policy.slack
        view = self._view(policy, req, state, written)
        excess = policy.excess(view, slots)
        candidates = np.unique(policy.candidates(view))
        if excess <= 0 or not len(candidates):
            return None
        low, high = view.evictable
        if (
            candidates[0] < low
            or candidates[-1] >= high
            or not np.isin(candidates, view.held).all()
        ):
            # Slots of the prefix tree would be freed, or the newest one, behind which SGLang writes.
            raise ValueError(
                f"policy {name}: candidates() needs held positions from {low} to {high - 1}, got others"
            )
        # The others free nothing: a position that stays reads the same slot or page.
        candidates = view.held[
            whole(np.isin(view.held, candidates), view.first_readers, self._page)
        ]
        if not len(candidates):
            return None
        self._stats.eviction_decisions += 1
        scores = self._scores(name, policy, req, state, view)
        return Decision(view, candidates, scores, excess if most is None else min(excess, most))

    def _slots(self, req: Request, written: int) -> int:
        """How many slots the first ``written`` positions of a request take."""
        row = self._row(req)
        return written - row.evicted - row.saved

    def _count_queries(
        self, name: str, policy: Evictor, req: Request, state: RowState, written: int
    ) -> None:
        """Have a policy with running totals (``accumulates``) count the newest queries now, if the buffer that
        keeps these queries may overwrite some of them before the next poll."""
        totals = state.totals.get(name)
        if totals is None or written - totals.seen + BETWEEN_POLLS > policy.queries:
            view = self._view(policy, req, state, written)
            self._scores(name, policy, req, state, view)

    def _view(self, policy: Evictor, req: Request, state: RowState, written: int) -> View:
        row = self._row(req)
        held = row.held(written)
        first, worth = row.first_readers(held, self._page)
        owned = req.kv.cache_protected_len
        if not policy.prompt:
            # The prompt stays, whether the prefix tree or the request owns its slots.
            owned = max(owned, len(req.origin_input_ids) // self._page * self._page)
        return View(
            prompt=len(req.origin_input_ids),
            written=written,
            owned=owned,
            page=self._page,
            held=held,
            first_readers=first,
            worth=worth,
            seed=zlib.crc32(array("q", req.origin_input_ids)),
        )

    def _scores(
        self, name: str, policy: Evictor, req: Request, state: RowState, view: View
    ) -> torch.Tensor:
        shifted = self._allocator.has_shifted_slots
        row = req.kv.req_pool_idx
        held = view.held
        layers = self._source.layers(row, held, view.written, shifted=shifted)
        if not policy.accumulates:
            return policy.scores(dataclasses.replace(view, layers=layers))
        at = upload(held, self._source.rows.device)
        totals = state.totals.get(name)
        earlier = None
        seen = 0
        if totals is not None:
            earlier = totals.scores.new_zeros(view.written)
            seen = totals.seen
            earlier[: len(totals.scores)] = totals.scores
            earlier = earlier[at]
        seen_by_now = dataclasses.replace(view, layers=layers, earlier=earlier, seen=seen)
        scores = policy.scores(seen_by_now)
        check_shape(scores, view)
        all_ = scores.new_zeros(view.written).index_put((at,), scores)
        state.totals[name] = Totals(all_, view.written)
        return scores

    def _evict_again(self, req: Request, state: RowState, written: int) -> None:
        again = state.again
        end = (written - 1) // self._page * self._page
        there = again < end
        state.again = again[~there]
        # The prefix tree may own the first positions now, if it held another response with the same text.
        owned = req.kv.cache_protected_len
        self._apply(req, state, again[there & (again >= owned)], written)

    def _apply(
        self,
        req: Request,
        state: RowState,
        positions: np.ndarray,
        written: int,
    ) -> int:
        """Evict ``positions``, int64 ``[n]`` ascending, except those already evicted and pages that are linked
        by now to pages that stay (``HostRow.first_readers``). Returns how many slots became free.

        A forward in flight may still read the old slots. That is safe, because only a later forward on the same
        stream overwrites freed slots.
        """
        known = self._row(req)
        positions = positions[known.at(positions) != EVICTED]
        if self._page > 1:
            held = known.held(written)
            first, _ = known.first_readers(held, self._page)
            positions = held[whole(np.isin(held, positions), first, self._page)]
        if not len(positions):
            return 0
        rows = self._rows.req_to_token
        row = req.kv.req_pool_idx
        where = row, upload(positions, rows.device)
        slots = rows[where]
        gone = torch.full_like(slots, -1)
        known.reserve(int(positions[-1]) + 1)
        change = self._allocator.prepare_known(slots, known.at(positions))
        begun = runs(positions)[: _REMEMBERED - len(state.evictions)]
        remembered = [(written, start, length) for start, length in begun]
        # If a rank failed so far, all ranks stop here.
        self._ranks.agree()
        with self._ranks.agreed():
            self._allocator.reads.freed()
            self._rows.write(where, gone)
            try:
                freed = self._allocator.commit(change, evicts=True)
            except BaseException:
                self._rows.write(where, slots)
                raise
            known.unset(positions)
        state.evictions += remembered
        self._stats.positions_evicted += len(positions)
        self._stats.slots_freed_by_eviction += freed
        return freed

    def _row(self, req: Request) -> HostRow:
        return self._allocator.row_of(req.kv.req_pool_idx)  # type: ignore[no-any-return]
