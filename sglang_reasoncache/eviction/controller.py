# SPDX-License-Identifier: Apache-2.0
"""Runs the evicting policies on one request and applies what they decide."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.compat.types import ReqToTokenPool, Request
from sglang_reasoncache.eviction.held import (
    AttentionSource,
    HeldAttention,
    HeldKeys,
    KeySource,
    Reads,
)
from sglang_reasoncache.eviction.policies.contract import (
    Eviction,
    NamedPolicy,
    NoAttention,
    RequestView,
)
from sglang_reasoncache.eviction.policies.evictor import runs
from sglang_reasoncache.eviction.row_state import (
    Asked,
    EvictedPositions,
    EvictionRefusal,
    EvictionStats,
    RowState,
    refusal_of_eviction,
    written_positions,
)

logger = logging.getLogger(__name__)


class PoolPressure:
    """Which policies with ``when`` above 0 may act now.

    Its use is read at every poll and release: what filled the pool may be gone before a request
    has too much again.
    """

    def __init__(self, evictors: Iterable[NamedPolicy], use: Callable[[], float]) -> None:
        self._use = use
        #: ``when`` and ``until`` of the policies that wait; others may always act.
        self.bounds = {
            name: (when, float(getattr(policy, "until", when)))
            for name, policy in evictors
            if (when := float(getattr(policy, "when", 0.0)))
        }
        self._acting: set[str] = set()

    def poll(self) -> None:
        """See which policies begin or end to act."""
        if self.bounds:
            use = self._use()
            for name in self.bounds:
                self._acts(name, use)

    def lets(self, name: str) -> bool:
        """Whether the policy may act now. Called when it would: evictions change the use."""
        return name not in self.bounds or self._acts(name, self._use())

    def _acts(self, name: str, use: float) -> bool:
        when, until = self.bounds[name]
        if use > (until if name in self._acting else when):
            self._acting.add(name)
        else:
            self._acting.discard(name)
        return name in self._acting

    def reset(self) -> None:
        """The pool is empty."""
        self._acting.clear()


def pool_use(allocator: Any, tree: Any) -> float:
    """Share of the slots that are neither free nor evictable, as SGLang's log line has it."""
    return 1.0 - (allocator.available_size() + tree.evictable_size()) / allocator.size


class EvictionController:
    """One per scheduler.

    Args:
        evictors: In the order in which they run.
        allocator: Ours, with reference counts.
        rows: SGLang's.
        keys: Read for policies that need them.
        use: The share of the pool in use, computed anew each time.
        weights: Attention statistics, None where no policy needs them.

    Attributes:
        described: Name and options of every policy, for the endpoint.
        positions_now: Positions that the running requests have evicted.
        evicts_prompts: Those of prompts may go, so running requests keep theirs to themselves.
    """

    def __init__(
        self,
        evictors: Sequence[NamedPolicy],
        allocator: Any,
        rows: ReqToTokenPool,
        keys: KeySource,
        use: Callable[[], float],
        weights: AttentionSource | None = None,
    ) -> None:
        self._evictors, self._allocator, self._page = evictors, allocator, allocator.page_size
        self._rows, self._keys, self._weights = rows, keys, weights
        # Read once: errors of another package's policy cannot be caught everywhere.
        self._of_prompts = {name for name, policy in evictors if getattr(policy, "prompt", False)}
        self._pressure = PoolPressure(evictors, use)
        self._slack = {name: operator.index(policy.slack) for name, policy in evictors}
        self.described = [{"name": name, **_options(policy)} for name, policy in evictors]
        self.is_active, self.evicts_prompts = bool(evictors), bool(self._of_prompts)
        self._failed: set[str] = set()
        self.positions_now = 0

    def in_turn(self, reqs: Iterable[Request]) -> list[Request]:
        """The order of polling: the longest row first where that decides who gives."""
        self._pressure.poll()
        if not self._pressure.bounds:
            return list(reqs)
        return sorted(reqs, key=lambda req: -req.kv.kv_allocated_len)

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
            decide: Run the policies, too.
        """
        if written is None:
            written = written_positions(req)
        evicted, protected = state.evicted, req.kv.cache_protected_len
        if evicted.again:
            # First of all: the row came back at its full size.
            end = (written - 1) // self._page * self._page
            # By now the prefix tree may own the first ones: another response with the same text.
            again = _within(evicted.again, protected, end)
            evicted.again = _within(evicted.again, end, sys.maxsize)
            self._apply(req, state, stats, again, written, protected)
        for name, policy in self._evictors if decide else ():
            if name not in state.asked and written < state.next_eviction.get(name, 0):
                continue
            # First position that the policy may evict, whoever owns the prompt.
            first = protected
            if name not in self._of_prompts:
                first = max(first, len(req.origin_input_ids) // self._page * self._page)
            evictions = self._decisions(name, policy, req, state, stats, written, first)
            self._apply(req, state, stats, evictions, written, first)

    def _decisions(
        self,
        name: str,
        policy: Any,
        req: Request,
        state: RowState,
        stats: EvictionStats,
        written: int,
        first: int,
    ) -> list[Eviction | None]:
        """What the policy answers; nothing if it fails, whatever it does wrong, and as long as what
        it reads is on its way from a GPU. Where other ranks ask theirs it must not fail on one
        alone: RuntimeError."""
        asked = state.asked.get(name)
        try:
            if asked is None:
                slots = written - state.evicted.count - self._row(req).shared
                excess = policy.excess(written, slots)
                if not excess > 0 or not self._pressure.lets(name):
                    return []
                # A budget below what a request must hold would have the policy run at every poll.
                state.next_eviction[name] = written + self._slack[name]
                stats.eviction_decisions += 1
                if policy.needs and self._keys.stream is not None:
                    # What is read is read behind the forward that may be in flight.
                    torch.cuda.current_stream().wait_stream(self._keys.stream)
                asked = self._ask(req, state, written, first, excess)
            elif not asked.reads.ready():
                return []
            elif not self._pressure.lets(name):
                # What others gave up meanwhile was enough.
                del state.asked[name], state.next_eviction[name]
                return []
            answer = policy.evict(asked.view, asked.excess)
            # More runs than positions are nonsense, and need not be listed to the end.
            plain = [_plain(evict) for evict in itertools.islice(answer, written + 1)]
            if asked.reads.late:
                state.asked[name] = asked
                return []
            if state.asked.pop(name, None) is None:
                return plain
            return _left(plain, first, written, self._page, state.evicted)
        except (Exception, SystemExit) as error:
            if asked is not None and asked.reads.late:
                # Of zeros.
                state.asked[name] = asked
                return []
            state.asked.pop(name, None)
            stats.eviction_refusals[EvictionRefusal.POLICY_FAILED.value] += 1
            if name not in self._failed:
                self._failed.add(name)
                logger.exception("reasoncache: policy %s failed, further failures count only", name)
            if not self._keys.ranks.alone:
                raise RuntimeError(f"policy {name} failed on a tensor-parallel rank") from error
            return []

    def _ask(self, req: Request, state: RowState, written: int, first: int, excess: int) -> Asked:
        held, row, weights = state.evicted.held(written), req.kv.req_pool_idx, self._weights
        reads = Reads(self._keys.ranks)
        view = RequestView(
            prompt=len(req.origin_input_ids),
            written=written,
            owned=first,
            page=self._page,
            held=held,
            slot_aliases=self._row(req).first_readers(held),
            seed=zlib.crc32(array("q", req.origin_input_ids)),
            keys=HeldKeys(self._keys, row, held, reads),
            attention=NoAttention()
            if weights is None
            else HeldAttention(weights, row, held, reads),
        )
        return Asked(view, excess, reads)

    def _apply(
        self,
        req: Request,
        state: RowState,
        stats: EvictionStats,
        evictions: Iterable[Eviction | None],
        written: int,
        first: int,
    ) -> None:
        """Evict what is allowed of ``evictions`` from position ``first`` on.

        A batch in flight reads the old slots or finds the positions evicted. Either is right:
        freed slots are only overwritten by a later forward on the same stream.
        """
        allowed, added = [], EvictedPositions()
        for evict in evictions:
            for evicted in (state.evicted, added):
                refusal = refusal_of_eviction(evict, first, written, self._page, evicted)
                if refusal is not None:
                    stats.eviction_refusals[refusal.value] += 1
                    break
            else:
                assert evict is not None, "refused as malformed"
                added.add(evict, written)
                allowed.append(evict)
        if not allowed:
            return
        positions = np.concatenate([np.arange(evict.start, evict.end) for evict in allowed])
        rows = self._rows.req_to_token
        row = req.kv.req_pool_idx
        where = row, upload(positions, rows.device)
        slots = rows[where]
        gone = torch.full_like(slots, -1)
        known = self._row(req)
        known.reserve(int(positions.max()) + 1)
        change = self._allocator.prepare_named(slots, known.at(positions))
        state.evicted.reserve(written)
        # All ranks are prepared: what follows does not fail.
        self._keys.ranks.agree()
        self._rows.write(where, gone)
        try:
            freed = self._allocator.commit(change, evicts=True)
        except BaseException:
            self._rows.write(where, slots)
            raise
        known.unset(positions)
        for evict in allowed:
            state.evicted.add(evict, written)
        self.positions_now += len(positions)
        stats.positions_evicted += len(positions)
        stats.slots_freed_by_eviction += freed

    def _row(self, req: Request) -> HostRow:
        found: HostRow = self._allocator.row_of(req.kv.req_pool_idx)
        return found

    def forget(self, state: RowState) -> int:
        """The row is gone; returns how many of its positions were evicted."""
        gone = state.evicted.count
        self.positions_now -= gone
        return gone

    def released(self) -> None:
        """A row gave its slots back."""
        self._pressure.poll()

    def reset(self) -> None:
        """The cache was flushed; nothing runs."""
        self.positions_now = 0
        self._pressure.reset()


def _options(policy: Any) -> dict[str, Any]:
    """As plain values: another package's may be anything."""
    names = [field.name for field in dataclasses.fields(policy) if field.init]
    values = {name: getattr(policy, name, None) for name in names}
    return {
        name: value if value is None or type(value) in (bool, int, float, str) else repr(value)
        for name, value in values.items()
    }


def _plain(answer: object) -> Eviction | None:
    """A copy; None, to be refused, for anything but an Eviction: a subclass may change, or raise."""
    return Eviction(answer.start, answer.length) if type(answer) is Eviction else None


def _left(
    evictions: list[Eviction | None], first: int, written: int, page: int, evicted: EvictedPositions
) -> list[Eviction | None]:
    """What is still held of them: another policy may have evicted since they were asked for."""
    held, left = evicted.held(written), list[Eviction | None]()
    for evict in evictions:
        refusal = refusal_of_eviction(evict, first, written, page, evicted)
        if evict is not None and refusal is EvictionRefusal.ALREADY_EVICTED:
            low, high = np.searchsorted(held, (evict.start, evict.end))
            left += runs(held[low:high])
        else:
            left.append(evict)
    return left


def _within(evictions: list[Eviction], start: int, end: int) -> list[Eviction]:
    """The parts of ``evictions`` in ``[start, end)``."""
    cut = [(max(run.start, start), min(run.end, end)) for run in evictions]
    return [Eviction(first, last - first) for first, last in cut if first < last]
