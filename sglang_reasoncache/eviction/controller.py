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
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.apply import (
    Evicted,
    EvictionApplier,
    EvictionRefusal,
    EvictionStats,
)
from sglang_reasoncache.eviction.attention import AttentionSource
from sglang_reasoncache.eviction.keys import KeySource
from sglang_reasoncache.eviction.policies.contract import (
    Eviction,
    NamedPolicy,
    NoAttention,
    RequestView,
)
from sglang_reasoncache.eviction.pressure import PoolPressure, waits_for
from sglang_reasoncache.eviction.row_state import RowState

logger = logging.getLogger(__name__)


class EvictionController:
    """One per scheduler.

    Args:
        evictors: In the order in which they run.
        applier: Checks and applies what they answer.
        keys: Read for policies that need them.
        page: Page size, positions.
        pressure: Which of them may act now.
        weights: Attention statistics, None where no policy needs them.

    Attributes:
        positions_now: Positions that the running requests have evicted.
        evicts_prompts: Positions of prompts may go, so running requests keep theirs to
            themselves.
    """

    def __init__(
        self,
        evictors: Sequence[NamedPolicy],
        applier: EvictionApplier,
        keys: KeySource,
        page: int,
        pressure: PoolPressure,
        weights: AttentionSource | None = None,
    ) -> None:
        self._evictors = tuple(evictors)
        self._applier, self._keys, self._page = applier, keys, page
        self._pressure, self._weights = pressure, weights
        # Read once: errors of another package's policy cannot be caught everywhere.
        self._of_prompts = {name for name, policy in evictors if getattr(policy, "prompt", False)}
        self._longest_first = any(waits_for(policy) for _, policy in evictors)
        pressure.watch(self._evictors)
        self._reads = any(policy.needs for _, policy in evictors)
        self._slack = {name: operator.index(policy.slack) for name, policy in evictors}
        self._described = [{"name": name, **_options(policy)} for name, policy in evictors]
        self.evicts_prompts = bool(self._of_prompts)
        self._failed: set[str] = set()
        self.positions_now = 0

    @property
    def is_active(self) -> bool:
        return bool(self._evictors)

    def wait(self) -> None:
        """Until the KV that is being computed is there, where a policy reads any."""
        if self._reads:
            self._keys.wait()

    def in_turn(self, reqs: Iterable[Request]) -> list[Request]:
        """The order of polling: the longest row first where that decides who gives."""
        self._pressure.poll()
        if not self._longest_first:
            return list(reqs)
        return sorted(reqs, key=lambda req: -req.kv.kv_allocated_len)

    def poll(
        self,
        req: Request,
        state: RowState,
        stats: EvictionStats,
        written: int | None = None,
        decide: bool = True,
    ) -> Evicted:
        """Evict what was evicted before a retraction, then what the policies give up now.

        ``req`` holds its row. ``written``: positions whose KV is there; None: all but that of
        the newest token, which the next forward writes. ``decide``: run the policies, too.
        """
        if written is None:
            written = len(req.origin_input_ids) + len(req.output_ids) - 1
            written = min(written, req.kv.kv_allocated_len)
        total = Evicted(0, 0)
        evicted = state.evicted
        if evicted.again:
            # First of all: the row came back at its full size.
            end = (written - 1) // self._page * self._page
            # By now the prefix tree may own the first ones: another response with the same text.
            again = _within(evicted.again, req.kv.cache_protected_len, end)
            evicted.again = _within(evicted.again, end, sys.maxsize)
            total += self._applier.apply(req, evicted, again, written, stats)
        for named in self._evictors if decide else ():
            if written < state.next_eviction.get(named.name, 0):
                continue
            # First position that the policy may evict, whoever owns the prompt.
            first = req.kv.cache_protected_len
            if named.name not in self._of_prompts:
                first = max(first, len(req.origin_input_ids) // self._page * self._page)
            evictions = self._decisions(named, req, state, written, stats, first)
            if evictions:
                total += self._applier.apply(req, evicted, evictions, written, stats, first)
        self.positions_now += total.positions
        return total

    def _decisions(
        self,
        named: NamedPolicy,
        req: Request,
        state: RowState,
        written: int,
        stats: EvictionStats,
        first: int,
    ) -> list[Eviction | None]:
        """What the policy answers; nothing if it fails, whatever it does wrong."""
        name, policy = named
        try:
            slots = written - state.evicted.count - state.live_positions
            excess = policy.excess(written, slots)
            if not excess > 0 or not self._pressure.lets(name):
                return []
            # A budget below what a request must hold would have the policy run at every poll.
            state.next_eviction[name] = written + self._slack[name]
            stats.eviction_decisions += 1
            answer = policy.evict(self._view(req, state, written, first), excess)
            # More runs than positions are nonsense, and need not be listed to the end.
            return [_plain(evict) for evict in itertools.islice(answer, written + 1)]
        except (Exception, SystemExit):
            stats.eviction_refusals[EvictionRefusal.POLICY_FAILED.value] += 1
            if name not in self._failed:
                self._failed.add(name)
                logger.exception("reasoncache: policy %s failed, further failures count only", name)
            return []

    def _view(self, req: Request, state: RowState, written: int, first: int) -> RequestView:
        held = state.evicted.held(written)
        row = req.kv.req_pool_idx
        return RequestView(
            prompt=len(req.origin_input_ids),
            written=written,
            owned=first,
            page=self._page,
            held=held,
            slot_aliases=state.slot_aliases.of(held),
            seed=zlib.crc32(array("q", req.origin_input_ids)),
            keys=self._keys.of(row, held),
            attention=NoAttention() if self._weights is None else self._weights.of(row, held),
        )

    def forget(self, state: RowState) -> int:
        """The row is gone; returns how many of its positions were evicted."""
        gone = state.evicted.count
        self.positions_now -= gone
        self._pressure.poll()
        return gone

    def reset(self) -> None:
        """The cache was flushed; nothing runs."""
        self.positions_now = 0
        self._pressure.reset()

    def describe(self) -> list[dict[str, Any]]:
        """Name and options of every policy, for the endpoint."""
        return self._described


def _options(policy: Any) -> dict[str, Any]:
    """As plain values: another package's may be anything."""
    if not dataclasses.is_dataclass(policy):
        return {}
    names = [field.name for field in dataclasses.fields(policy) if field.init]
    values = {name: getattr(policy, name, None) for name in names}
    return {
        name: value if value is None or type(value) in (bool, int, float, str) else repr(value)
        for name, value in values.items()
    }


def _plain(answer: object) -> Eviction | None:
    """A copy; None, which is refused when it is applied, for anything but an :class:`Eviction`:
    what a subclass of it says may change, or raise."""
    return Eviction(answer.start, answer.length) if type(answer) is Eviction else None


def _within(evictions: list[Eviction], start: int, end: int) -> list[Eviction]:
    """The parts of ``evictions`` in ``[start, end)``."""
    cut = [(max(run.start, start), min(run.end, end)) for run in evictions]
    return [Eviction(first, last - first) for first, last in cut if first < last]
