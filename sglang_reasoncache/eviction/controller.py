# SPDX-License-Identifier: Apache-2.0
"""Asks the evicting policies about one request at a time, and applies what they decide."""

from __future__ import annotations

import dataclasses
import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.cache.ranks import Ranks
from sglang_reasoncache.cache.slot_names import EVICTED
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.eviction.decision import Decision
from sglang_reasoncache.eviction.held import KeySource
from sglang_reasoncache.eviction.policies.contract import NamedPolicy, View
from sglang_reasoncache.eviction.policies.evictor import ALWAYS, Evictor
from sglang_reasoncache.eviction.row_state import EvictionStats, RowState, Totals, written_positions

#: Positions that a request writes at most between two polls, and some.
_BETWEEN_POLLS = 8


class EvictionController:
    """One per scheduler. Policies act in the order in which they are given: those with
    ``when=always`` at every poll, those with ``when=short`` where :meth:`give` is called.

    Args:
        source: What policies read.
        ranks: They are asked about the same requests in the same order.

    Attributes:
        described: Name and options of every policy, for the endpoint.
        positions_now: Positions that the running requests have evicted.
        evicts_prompts: Those of prompts may go, so running requests keep theirs to themselves.
        waits: A policy has ``when=short``.
    """

    def __init__(
        self,
        evictors: Sequence[NamedPolicy],
        allocator: Any,
        rows: ReqToTokenPool,
        source: KeySource,
        ranks: Ranks,
    ) -> None:
        self._evictors, self._allocator, self._page = evictors, allocator, allocator.page_size
        self._rows, self._source, self._ranks = rows, source, ranks
        self.described = [{"name": name, **dataclasses.asdict(policy)} for name, policy in evictors]
        self.is_active = bool(evictors)
        self.waits = any(policy.when != ALWAYS for _, policy in evictors)
        self.evicts_prompts = any(policy.prompt for _, policy in evictors)
        self.positions_now = 0

    def poll(
        self,
        req: Request,
        state: RowState,
        stats: EvictionStats,
        written: int | None = None,
        decide: bool = True,
    ) -> None:
        """Evict what was evicted before a retraction, then what the policies give up now.

        Args:
            req: Holds its row. ``state`` and ``stats`` change by what is applied.
            written: Positions whose KV is there; None: :func:`written_positions`.
            decide: Ask the policies, too.
        """
        if written is None:
            written = written_positions(req)
        if len(state.evicted.again):
            # First of all: the row came back at its full size.
            self._evict_again(req, state, stats, written)
        for name, policy in self._evictors if decide else ():
            decision = state.decisions.pop(name, None)
            if decision is None and policy.when == ALWAYS:
                decision = self._decided(name, policy, req, state, stats, written)
            if decision is not None and not decision.ready(self._ranks):
                state.decisions[name] = decision
            elif decision is not None:
                self._apply(req, state, stats, decision.positions(self._ranks), written)
            elif policy.accumulates:
                self._count_queries(name, policy, req, state, written)

    def give(self, req: Request, state: RowState, stats: EvictionStats, wanted: int) -> int:
        """SGLang is about to retract a request for want of ``wanted`` slots: how many came back.

        Policies with ``when=short`` go down to their budgets at most, and take more than is wanted
        where that is less than their slack: a shortage comes again with every decode step. On a
        GPU this waits for the scores, behind the forward in flight: recomputing a retracted
        request would take far longer.
        """
        written, before = written_positions(req), stats.slots_freed_by_eviction
        for name, policy in self._evictors:
            missing = wanted - (stats.slots_freed_by_eviction - before)
            if policy.when == ALWAYS or missing <= 0:
                continue
            most = max(missing, policy.slack)
            decision = self._decided(name, policy, req, state, stats, written, most)
            if decision is not None:
                self._apply(req, state, stats, decision.positions(self._ranks), written)
        return stats.slots_freed_by_eviction - before

    def _decided(
        self,
        name: str,
        policy: Evictor,
        req: Request,
        state: RowState,
        stats: EvictionStats,
        written: int,
        most: int | None = None,
    ) -> Decision | None:
        """What a policy gives up of a request with more slots than it may have.

        ``most``: Slots at most, without slack. None: all beyond the budget, once the slack is used
        up, and then again after as many new positions: a budget may be below what must stay.
        """
        slots = written - state.evicted.count - state.live_positions
        slack = policy.slack if most is None else 0
        if slots - policy.allowed(written) <= slack or (
            most is None and written < state.next_eviction.get(name, 0)
        ):
            return None
        state.next_eviction[name] = written + policy.slack
        view = self._view(policy, req, state, written)
        excess, candidates = policy.excess(view, slots), policy.candidates(view)
        if excess <= 0 or not len(candidates):
            return None
        stats.eviction_decisions += 1
        scores = self._scores(name, policy, req, state, view)
        return Decision(view, candidates, scores, excess if most is None else min(excess, most))

    def _count_queries(
        self, name: str, policy: Evictor, req: Request, state: RowState, written: int
    ) -> None:
        """Have an accumulating policy count queries that would be written over by the next poll."""
        totals = state.totals.get(name)
        if totals is None or written - totals.seen + _BETWEEN_POLLS > policy.queries:
            view = self._view(policy, req, state, written)
            self._scores(name, policy, req, state, view)

    def _view(self, policy: Evictor, req: Request, state: RowState, written: int) -> View:
        held = state.evicted.held(written)
        owned = req.kv.cache_protected_len
        if not policy.prompt:
            # Whoever owns the prompt.
            owned = max(owned, len(req.origin_input_ids) // self._page * self._page)
        return View(
            prompt=len(req.origin_input_ids),
            written=written,
            owned=owned,
            page=self._page,
            held=held,
            slot_aliases=state.slot_aliases.of(held),
            seed=zlib.crc32(array("q", req.origin_input_ids)),
        )

    def _scores(
        self, name: str, policy: Evictor, req: Request, state: RowState, view: View
    ) -> torch.Tensor:
        shifted = self._allocator.has_shifted_slots
        row, held = req.kv.req_pool_idx, view.held
        layers = self._source.layers(row, held, view.written, shifted=shifted)
        if not policy.accumulates:
            return policy.scores(dataclasses.replace(view, layers=layers))
        at = upload(held, self._source.rows.device)
        totals, earlier, seen = state.totals.get(name), None, 0
        if totals is not None:
            earlier, seen = totals.scores.new_zeros(view.written), totals.seen
            earlier[: len(totals.scores)] = totals.scores
            earlier = earlier[at]
        seen_by_now = dataclasses.replace(view, layers=layers, earlier=earlier, seen=seen)
        scores = policy.scores(seen_by_now)
        all_ = scores.new_zeros(view.written).index_put((at,), scores)
        state.totals[name] = Totals(all_, view.written)
        return scores

    def _evict_again(
        self, req: Request, state: RowState, stats: EvictionStats, written: int
    ) -> None:
        again, end = state.evicted.again, (written - 1) // self._page * self._page
        there = again < end
        state.evicted.again = again[~there]
        # By now the prefix tree may own the first ones: another response with the same text.
        owned = req.kv.cache_protected_len
        self._apply(req, state, stats, again[there & (again >= owned)], written)

    def _apply(
        self,
        req: Request,
        state: RowState,
        stats: EvictionStats,
        positions: np.ndarray,
        written: int,
    ) -> None:
        """Evict those of ``positions`` that are still held: another policy may have been faster.

        A batch in flight reads the old slots or finds the positions evicted. Either is right:
        freed slots are only overwritten by a later forward on the same stream.
        """
        positions = state.evicted.still_held(positions)
        if not len(positions):
            return
        rows = self._rows.req_to_token
        row = req.kv.req_pool_idx
        where = row, upload(positions, rows.device)
        slots = rows[where]
        gone = torch.full_like(slots, -1)
        names = self._allocator.names_in(row, int(positions[-1]) + 1)
        change = self._allocator.prepare_named(slots, names.at(positions))
        state.evicted.reserve(written)
        # All ranks are prepared: what follows does not fail.
        self._ranks.agree()
        self._rows.write(where, gone)
        try:
            freed = self._allocator.commit(change, evicts=True)
        except BaseException:
            self._rows.write(where, slots)
            raise
        names.set(positions, EVICTED)
        state.evicted.add(positions, written)
        # What did not come back has another name: one reference less to count.
        state.live_positions -= len(positions) - freed
        self.positions_now += len(positions)
        stats.positions_evicted += len(positions)
        stats.slots_freed_by_eviction += freed

    def forget(self, state: RowState) -> int:
        """The row is gone; returns how many of its positions were evicted."""
        gone = state.evicted.count
        self.positions_now -= gone
        return gone

    def reset(self) -> None:
        """The cache was flushed; nothing runs."""
        self.positions_now = 0


def longest_first(reqs: Iterable[Request]) -> list[Request]:
    """The order in which requests give slots."""
    return sorted(reqs, key=lambda req: -req.kv.kv_allocated_len)
