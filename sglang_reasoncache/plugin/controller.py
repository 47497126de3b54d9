# SPDX-License-Identifier: Apache-2.0
"""One per scheduler process: polls the running requests and has each feature do its part.

Called after each decode step has been processed, between two forwards.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import SharingForecast
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.plugin.report import Report
from sglang_reasoncache.sharing import state as request_state
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.state import RequestState, is_running, state_of, takes_part
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Decode steps between two polls. A step of a response has some 25 tokens, so little is lost;
#: a poll costs the scheduler a microsecond a request.
INTERVAL = 4
#: Polls between two updates of the Prometheus series when nothing is shared.
_METRICS_INTERVAL = 8


class Controller:
    """What SGLang's scheduler and our tree call.

    Args:
        config: Resolved settings (``positions`` is not ``auto``).
        interval: Decode steps between two polls.
    """

    state_of = staticmethod(request_state.state_of)
    allows = staticmethod(request_state.allows)

    def __init__(
        self,
        config: ReasonCacheConfig,
        stats: SharingStats,
        tracker: RequestTracker,
        pipeline: BlockPipeline,
        eviction: EvictionController,
        report: Report,
        interval: int = INTERVAL,
    ) -> None:
        self.config, self.stats, self.report = config, stats, report
        self.forecast = SharingForecast(config.admission_credit)
        self._tracker, self._pipeline, self._eviction = tracker, pipeline, eviction
        self._interval = interval
        self._decode_steps = 0

    @property
    def live_positions(self) -> int:
        """Slots that the running requests do without by sharing."""
        return self._pipeline.live_positions

    @property
    def saved_positions(self) -> int:
        """Those, and the evicted ones."""
        return self._pipeline.live_positions + self._eviction.positions_now

    # -- asked by the tree ----------------------------------------------------

    def keeps_prompt(self, req: Request) -> bool:
        """Whether a running request's prompt is its own, so that positions of it may be evicted."""
        return self._eviction.evicts_prompts and takes_part(req)

    def after_chunk(self, req: Request, written: int) -> None:
        """A chunk of a prompt that is the request's own has been computed.

        ``written``: positions whose KV is there when the device has done what is queued. The next
        chunk has no slots yet.
        """
        start = time.perf_counter()
        self._eviction.wait()
        self._evict(req, self._tracker.follow(req), written)
        self.stats.scheduler_seconds += time.perf_counter() - start

    def on_release(self, req: Request) -> None:
        """The row is gone: the request finished, was aborted or retracted."""
        state = state_of(req)
        ended = req.finished() and not isinstance(req.finished_reason, compat.FINISH_ABORT)
        if state is None:
            if ended:
                # Between two polls.
                self._tracker.count(req)
                if takes_part(req):
                    positions = len(req.origin_input_ids) + len(req.output_ids)
                    self.stats.request_finished(0, positions)
            return
        shared = state.live_positions
        self._pipeline.give_up(state, shared)
        evicted = self._eviction.forget(state)
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
        self._tracker.reset()
        self._pipeline.reset()
        self._eviction.reset()
        self.report.reset()

    def describe(self) -> dict[str, Any]:
        """JSON for the endpoint."""
        return self.report.describe(self.forecast.credit)

    # -- a decode step --------------------------------------------------------

    def after_decode(self, reqs: Sequence[Request]) -> int:
        """Share and evict what is ready; return how many slots came back to the allocator."""
        self._decode_steps += 1
        publishes = self._decode_steps % (_METRICS_INTERVAL * self._interval) == 0
        if publishes:
            self.report.publish_selection()
        if not self.config.is_active:
            return 0
        self.stats.decode_steps += 1
        if self._decode_steps % self._interval:
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
        self._pipeline.threshold.maybe_save()
        return self.saved_positions - before

    def _poll(self, reqs: Sequence[Request]) -> None:
        """Share, feed, evict.

        In this order the engine has had some decode steps for what it was fed, so a
        response is shared at the same tokens in every run, unless the machine is short.
        """
        self._pipeline.advance()
        running = [req for req in reqs if is_running(req)]
        logical = output = 0
        # Admission holds nothing back for prompts, so what they give up is not to be counted on.
        saved = self.live_positions
        for req in running:
            state = self._tracker.follow(req)
            if state.reapply:
                self._pipeline.reapply(req, state)
            logical += req.kv.kv_allocated_len
            output += len(req.output_ids)
            saved += state.evicted.count_from(len(req.origin_input_ids))
        self._tracker.feed(running)
        self.stats.poll(len(running), self.saved_positions, logical)
        self.forecast.poll(saved, output)
        if self._eviction.is_active:
            # Until all blocks of a recomputed row are applied again it takes slots that policies
            # need not ask for.
            reapplying = self._pipeline.reapplying()
            for req in self._eviction.in_turn(running):
                self._evict(req, self._tracker.follow(req), ask=id(req) not in reapplying)

    def after_prefill(self, reqs: Sequence[Request], written: Sequence[int]) -> int:
        """Likewise, for requests whose prompts, or chunks of them, were computed up to ``written``."""
        start, before = time.perf_counter(), self.saved_positions
        for req, positions in zip(reqs, written, strict=True):
            if is_running(req) and self.keeps_prompt(req):
                self._evict(req, self._tracker.follow(req), positions)
        self.stats.scheduler_seconds += time.perf_counter() - start
        return self.saved_positions - before

    def _evict(
        self, req: Request, state: RequestState, written: int | None = None, ask: bool = True
    ) -> None:
        if state.takes_part:
            named = self._eviction.poll(req, state, self.stats, written, ask)
            # What did not come back has another name: one reference less to count.
            self._pipeline.give_up(state, named)
