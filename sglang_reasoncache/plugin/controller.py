# SPDX-License-Identifier: Apache-2.0
"""One per scheduler process: polls the running requests and has each feature do its part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import SharingForecast
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.controller import EvictionController, longest_first
from sglang_reasoncache.plugin.containment import Containment
from sglang_reasoncache.plugin.report import Report
from sglang_reasoncache.sharing import state as request_state
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.state import RequestState, is_running, state_of, takes_part
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Decode steps between two polls.
INTERVAL = 4
#: Polls between two updates of the Prometheus series when nothing is shared.
_METRICS_INTERVAL = 8


@dataclass(eq=False)
class Controller:
    """What SGLang's scheduler and our tree call; none of it raises (``containment.py``).

    Reductions over tensor-parallel ranks are made only inside of :meth:`Containment.together`,
    which all ranks enter alike: by what was decoded or computed, nothing else. ``config`` is
    resolved (``positions`` is not ``auto``), ``interval`` in decode steps.
    """

    config: ReasonCacheConfig
    stats: SharingStats
    tracker: RequestTracker
    pipeline: BlockPipeline
    eviction: EvictionController
    report: Report
    interval: int = INTERVAL
    state_of = staticmethod(request_state.state_of)
    allows = staticmethod(request_state.allows)

    def __post_init__(self) -> None:
        self.forecast = SharingForecast(self.config.admission_credit)
        self.containment = Containment(self.tracker.ranks, self._disable)
        self._decode_steps, self._is_active = 0, self.config.is_active
        #: By ``id``, those of the last poll that have kept their rows since.
        self._running: dict[int, Request] = {}
        with self.containment:
            self.report.publish()

    def _disable(self, reason: str) -> None:
        """Share and evict no more; what is shared and evicted stays so."""
        self.report.disabled = reason
        # What still runs will share no more.
        self.forecast = SharingForecast(0.0)
        self.pipeline.drop()
        self.tracker.stop()
        self.report.publish()

    @property
    def saved_positions(self) -> int:
        """Slots that the running requests do without by sharing, and by evicting."""
        return self.report.slots_saved

    def keeps_prompt(self, req: Request) -> bool:
        """Whether a running request's prompt is its own, so that positions of it may be evicted."""
        return self.eviction.evicts_prompts and takes_part(req)

    def after_chunk(self, req: Request, written: int) -> None:
        """A chunk of a prompt that is the request's own was computed, up to ``written``."""
        if self.report.disabled is None:
            self.containment.together(self._poll_prompts, (req,), (written,))

    def on_release(self, req: Request) -> None:
        """The row is gone: the request finished, was aborted or retracted."""
        with self.containment:
            self._on_release(req, state_of(req))

    def _on_release(self, req: Request, state: RequestState | None) -> None:
        shared = evicted = across = shareable = 0
        if state is not None:
            # SGLang's own books rely on these; nothing that fails comes before them.
            shared = state.live_positions
            self.pipeline.give_up(state, shared)
            evicted = self.eviction.forget(state)
            across = len(state.across)
        try:
            if state is not None:
                shareable = self.pipeline.ledger.slots_of(req)
                self.pipeline.forget(req)
            if req.finished():
                self._on_end(req, state, shared, evicted, shareable)
            elif state is not None and state.followed is not None:
                state.followed.join(False)
        finally:
            self._running.pop(id(req), None)
            if state is not None:
                state.forget_row()
        if shared + evicted + across and not self.saved_positions:
            self.report.publish()

    def _on_end(
        self, req: Request, state: RequestState | None, shared: int, evicted: int, shareable: int
    ) -> None:
        """A request finished or was aborted; ``shared``, ``evicted``, ``shareable``: positions of its
        row."""
        ended = not isinstance(req.finished_reason, compat.FINISH_ABORT)
        if ended and state is None:
            self.tracker.count(req)
            if takes_part(req):
                positions = len(req.origin_input_ids) + len(req.output_ids)
                self.stats.request_finished(0, positions)
        elif ended and state is not None and state.takes_part:
            of_output = state.evicted.count_from(len(req.origin_input_ids))
            self.forecast.observe(shared + shareable + of_output, len(req.output_ids))
            self.report.request_finished(req, state, shared + state.foreign, evicted)
        if state is not None and state.followed is not None:
            state.followed.close()

    def reset(self) -> None:
        """The cache was flushed; SGLang does that only when nothing runs."""
        with self.containment:
            self.pipeline.reset()
            self.eviction.reset()
            self.stats.reset()
            self.tracker.reset()
            self.report.recent.clear()

    def describe(self, details: bool = False) -> dict[str, Any]:
        """JSON for the endpoint; see :meth:`Report.describe`. Without more than ``disabled`` where
        that fails."""
        with self.containment:
            return self.report.describe(self.forecast.credit, details)
        return {"disabled": self.report.disabled}

    def after_decode(self, reqs: Sequence[Request]) -> int:
        """Find, share and evict what is ready, between two forwards; return how many slots more SGLang
        can have."""
        self._decode_steps += 1
        self.stats.decode_steps += self._is_active
        if self._decode_steps % self.interval:
            return 0
        before, compared = self._to_have, self.stats.blocks_compared
        start = time.perf_counter()
        if self._is_active and self.report.disabled is None:
            self.containment.together(self._poll, reqs)
        with self.containment:
            elapsed = time.perf_counter() - start
            self.stats.scheduler_seconds += elapsed
            publishes = self._decode_steps % (_METRICS_INTERVAL * self.interval) == 0
            if publishes:
                self.report.publish_selection()
            if self.stats.blocks_compared > compared:
                self.report.publish(elapsed)
            elif publishes:
                self.report.publish()
            self.pipeline.threshold.maybe_save()
        return self._to_have - before

    @property
    def _to_have(self) -> int:
        """Slots that came back, and those of the ledger."""
        return self.saved_positions + self.pipeline.ledger.slots

    def shareable(self) -> int:
        """Slots that :meth:`reclaim` can bring back, on all ranks. They call this together."""
        least = 0

        def ask() -> None:
            nonlocal least
            least = self.tracker.ranks.least(self.pipeline.ledger.slots)

        if self._is_active and self.report.disabled is None:
            self.containment.together(ask)
        return least if self.report.disabled is None else 0

    def reclaim(self, wanted: int) -> None:
        """SGLang is short of ``wanted`` slots and has nothing left to evict. All ranks call this
        together: the same slots are free on each."""
        if self._is_active and self.report.disabled is None:
            self.containment.together(self._reclaim, wanted)

    def _reclaim(self, wanted: int) -> None:
        start = time.perf_counter()
        self.stats.shortages += 1
        missing = wanted - self.pipeline.reclaim(wanted)
        # What sharing cannot give, policies with ``when=short`` may.
        for req in longest_first(self._running.values()) if self.eviction.waits else ():
            if missing <= 0:
                break
            if is_running(req):
                state, before = self.tracker.follow(req), self.stats.slots_freed_by_eviction
                self._evict(req, state, self.eviction.give, missing)
                missing -= self.stats.slots_freed_by_eviction - before
        self.stats.scheduler_seconds += time.perf_counter() - start

    def _poll(self, reqs: Sequence[Request]) -> None:
        """Share, feed, evict: the engine then has some decode steps for what it is fed."""
        self.pipeline.advance()
        running = [req for req in reqs if is_running(req)]
        self._running = {id(req): req for req in running}
        logical = output = 0
        # Admission holds nothing back for prompts, so what they give up is not to be counted on.
        saved = self.pipeline.saved + self.pipeline.ledger.slots
        for req in running:
            state = self.tracker.follow(req)
            if state.recomputed and state.followed is not None:
                state.followed.join(True)
            if state.recomputed or state.pending:
                self.pipeline.requeue(req, state)
            logical += req.kv.kv_allocated_len
            output += len(req.output_ids)
            saved += state.evicted.count_from(len(req.origin_input_ids))
        self.tracker.feed(running)
        self.stats.poll(len(running), self.saved_positions, logical, self.pipeline.across)
        self.forecast.poll(saved, output)
        if self.eviction.is_active:
            # A recomputed row takes more slots until all its blocks are applied again.
            returning = self.pipeline.returning()
            for req in running:
                ask = id(req) not in returning
                self._evict(req, self.tracker.follow(req), self.eviction.poll, None, ask)

    def after_prefill(self, reqs: Sequence[Request], written: Iterable[int]) -> int:
        """Likewise, for prompts, or chunks of them, that were computed up to ``written``."""
        before = self.saved_positions
        if self.eviction.evicts_prompts and self.report.disabled is None:
            self.containment.together(self._poll_prompts, reqs, written)
        return self.saved_positions - before

    def _poll_prompts(self, reqs: Sequence[Request], written: Iterable[int]) -> None:
        start = time.perf_counter()
        for req, positions in zip(reqs, written, strict=True):
            if is_running(req) and self.keeps_prompt(req):
                self._evict(req, self.tracker.follow(req), self.eviction.poll, positions)
        self.stats.scheduler_seconds += time.perf_counter() - start

    def _evict(
        self, req: Request, state: RequestState, work: Callable[..., Any], *arguments: object
    ) -> None:
        """``work``: of the eviction controller."""
        if state.takes_part:
            shared, evicted = state.live_positions, state.evicted.count
            try:
                work(req, state, self.stats, *arguments)
            finally:
                self.pipeline.within += state.live_positions - shared
            if state.evicted.count > evicted:
                self.pipeline.evicted(req)
