# SPDX-License-Identifier: Apache-2.0
"""One per scheduler process: polls the running requests and has each feature do its part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.allocator import SharingForecast
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.controller import EvictionController
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
    """What SGLang's scheduler and our tree call.

    ``config`` is resolved (``positions`` is not ``auto``), ``interval`` in decode steps.
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
        self._decode_steps = 0

    @property
    def live_positions(self) -> int:
        """Slots that the running requests do without by sharing."""
        return self.pipeline.live_positions

    @property
    def saved_positions(self) -> int:
        """Those, and the evicted ones."""
        return self.report.slots_saved

    def keeps_prompt(self, req: Request) -> bool:
        """Whether a running request's prompt is its own, so that positions of it may be evicted."""
        return self.eviction.evicts_prompts and takes_part(req)

    def after_chunk(self, req: Request, written: int) -> None:
        """A chunk of a prompt that is the request's own was computed, up to ``written``."""
        start = time.perf_counter()
        self._evict(req, self.tracker.follow(req), written)
        self.stats.scheduler_seconds += time.perf_counter() - start

    def on_release(self, req: Request) -> None:
        """The row is gone: the request finished, was aborted or retracted."""
        state = state_of(req)
        ended = req.finished() and not isinstance(req.finished_reason, compat.FINISH_ABORT)
        if state is None:
            if ended:
                self.tracker.count(req)
                if takes_part(req):
                    positions = len(req.origin_input_ids) + len(req.output_ids)
                    self.stats.request_finished(0, positions)
            return
        shared = state.live_positions
        self.pipeline.give_up(state, shared)
        evicted = self.eviction.forget(state)
        if ended and state.takes_part:
            of_output = state.evicted.count_from(len(req.origin_input_ids))
            self.forecast.observe(shared + of_output, len(req.output_ids))
            self.report.request_finished(req, state, shared, evicted)
        if req.finished() and state.followed is not None:
            state.followed.close()
        state.forget_row()
        if shared + evicted and not self.saved_positions:
            self.report.publish()

    def reset(self) -> None:
        """The cache was flushed; SGLang does that only when nothing runs."""
        self.stats.reset()
        self.tracker.reset()
        self.pipeline.reset()
        self.eviction.reset()
        self.report.recent.clear()

    def describe(self, details: bool = False) -> dict[str, Any]:
        """JSON for the endpoint; see :meth:`Report.describe`."""
        return self.report.describe(self.forecast.credit, details)

    def after_decode(self, reqs: Sequence[Request]) -> int:
        """Share and evict what is ready, between two forwards; return how many slots came back."""
        self._decode_steps += 1
        publishes = self._decode_steps % (_METRICS_INTERVAL * self.interval) == 0
        if publishes:
            self.report.publish_selection()
        if not self.config.is_active:
            return 0
        self.stats.decode_steps += 1
        if self._decode_steps % self.interval:
            return 0
        before = self.saved_positions
        start, compared = time.perf_counter(), self.stats.blocks_compared
        self._poll(reqs)
        elapsed = time.perf_counter() - start
        self.stats.scheduler_seconds += elapsed
        if self.stats.blocks_compared > compared:
            self.report.publish(elapsed)
        elif publishes:
            self.report.publish()
        self.pipeline.threshold.maybe_save()
        return self.saved_positions - before

    def _poll(self, reqs: Sequence[Request]) -> None:
        """Share, feed, evict: the engine then has some decode steps for what it is fed."""
        self.pipeline.advance()
        running = [req for req in reqs if is_running(req)]
        logical = output = 0
        # Admission holds nothing back for prompts, so what they give up is not to be counted on.
        saved = self.live_positions
        for req in running:
            state = self.tracker.follow(req)
            if state.reapply:
                self.pipeline.reapply(req, state)
            logical += req.kv.kv_allocated_len
            output += len(req.output_ids)
            saved += state.evicted.count_from(len(req.origin_input_ids))
        self.tracker.feed(running)
        self.stats.poll(len(running), self.saved_positions, logical)
        self.forecast.poll(saved, output)
        if self.eviction.is_active:
            # A recomputed row takes more slots until all its blocks are applied again.
            reapplying = self.pipeline.reapplying()
            for req in self.eviction.in_turn(running):
                self._evict(req, self.tracker.follow(req), ask=id(req) not in reapplying)

    def after_prefill(self, reqs: Sequence[Request], written: Sequence[int]) -> int:
        """Likewise, for prompts, or chunks of them, that were computed up to ``written``."""
        start, before = time.perf_counter(), self.saved_positions
        for req, positions in zip(reqs, written, strict=True):
            if is_running(req) and self.keeps_prompt(req):
                self._evict(req, self.tracker.follow(req), positions)
        self.stats.scheduler_seconds += time.perf_counter() - start
        return self.saved_positions - before

    def _evict(
        self, req: Request, state: RequestState, written: int | None = None, ask: bool = True
    ) -> None:
        if state.takes_part:
            named = self.eviction.poll(req, state, self.stats, written, ask)
            # What did not come back has another name: one reference less to count.
            self.pipeline.give_up(state, named)
