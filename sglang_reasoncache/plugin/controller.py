# SPDX-License-Identifier: Apache-2.0
"""The controller of a scheduler process *polls* (looks at) the running requests, shares, evicts and reports."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import SharingForecast
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.custom_params import takes_part
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.plugin.containment import Containment
from sglang_reasoncache.plugin.report import Report
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.state import RequestState, is_running, state_of
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Decode steps between two polls.
INTERVAL = 4
#: Polls between two updates of the Prometheus series while polls compare no blocks.
_METRICS_INTERVAL = 8


@dataclass(eq=False)
class Controller:
    """Called by SGLang's scheduler (through hooks), by our allocator and by our prefix tree. The controller's
    public methods do not raise (``containment.py``).

    Ranks exchange numbers only inside :meth:`Containment.together`. All ranks call that method at the same
    points, because what leads to a call is equal on all: decode steps, prefills, admissions, free slots.

    Attributes:
        config: Resolved settings: ``positions`` is not ``auto``.
        interval: Decode steps between two polls.
    """

    config: ReasonCacheConfig
    stats: SharingStats
    tracker: RequestTracker
    pipeline: BlockPipeline
    eviction: EvictionController
    report: Report
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        self.forecast = SharingForecast(self.config.admission_credit)
        self.containment = Containment(self.tracker.ranks, self._disable)
        self._decode_steps, self._is_active = 0, self.config.is_active
        #: True between a vote of DP attention and the forward that was voted on: no poll runs meanwhile.
        self.holds = False
        #: Python ``id`` -> request: the requests of the last poll, without those released since.
        self._running: dict[int, Request] = {}
        with self.containment:
            self.report.publish()

    def _disable(self, reason: str) -> None:
        """Stop sharing and evicting. Shared blocks stay shared, and evicted positions stay evicted."""
        self.report.disabled = reason
        # Admission must not count on further sharing.
        self.forecast = SharingForecast(0.0)
        self.pipeline.drop()
        self.tracker.stop()
        self.report.publish()

    def keeps_prompt(self, req: Request) -> bool:
        """Whether a request keeps its prompt out of the prefix tree while it runs. Only then can a policy
        evict positions of the prompt, because the tree owns the slots of all that it holds."""
        return self.eviction.evicts_prompts and takes_part(req)

    def after_chunk(self, req: Request, written: int) -> None:
        """Let policies evict after a chunk of a prompt was computed, if :meth:`keeps_prompt` holds.
        ``written``: how many positions of the prompt have their KV written."""
        if self.report.disabled is None:
            self.containment.together(self._poll_prompts, (req,), (written,))

    def on_release(self, req: Request, row: HostRow) -> None:
        """Account for a request that finished, was aborted or retracted. ``row``: our copy of its freed row."""
        with self.containment:
            self._on_release(req, state_of(req), row)

    def _on_release(self, req: Request, state: RequestState | None, row: HostRow) -> None:
        # ``forget`` comes before code that can fail, because SGLang's slot check needs the new count.
        expected, evicted = 0.0, self.eviction.forget(row)
        try:
            if state is not None:
                expected = self.pipeline.expected_of(req, state)
                self.pipeline.forget(req)
            if req.finished():
                self._on_end(req, state, row, evicted, expected)
            elif state is not None and state.followed is not None:
                state.followed.join(False)
        finally:
            self._running.pop(id(req), None)
            if state is not None:
                state.forget_row(row)
        if (row.saved or evicted or row.in_other_rows) and not self.report.slots_saved:
            self.report.publish()

    def _on_end(
        self, req: Request, state: RequestState | None, row: HostRow, evicted: int, expected: float
    ) -> None:
        """Count a request, unless it was aborted, and let the filter forget it. ``evicted``: evicted positions
        of its ``row``. ``expected``: slots that its blocks would have freed in a shortage of slots."""
        ended = not isinstance(req.finished_reason, compat.FINISH_ABORT)
        if ended and state is None:
            self.tracker.count(req)
            if takes_part(req):
                positions = len(req.origin_input_ids) + len(req.output_ids)
                self.stats.request_finished(0, positions)
        elif ended and state is not None and state.takes_part:
            of_output = len(row.evicted_from(len(req.origin_input_ids)))
            self.forecast.observe(row.saved + expected + of_output, len(req.output_ids))
            self.report.request_finished(req, state, row.saved + row.borrowed, evicted)
        if state is not None and state.followed is not None:
            state.followed.close()

    def reset(self) -> None:
        """Start anew. SGLang calls this when it flushes its cache, while no request runs. Accepted distances
        are dropped too, because requests that a pause retracted may go on with other weights."""
        with self.containment:
            if self.report.disabled is None:
                self.forecast = SharingForecast(self.config.admission_credit)
            self.pipeline.reset()
            self.eviction.reset()
            self.stats.reset()
            self.tracker.reset()
            self.report.clear()

    def describe(self, details: bool = False, blocks: bool = True) -> dict[str, Any]:
        """JSON for the endpoint, from :meth:`Report.describe`. If that method fails, the JSON has only the
        field ``disabled``."""
        with self.containment:
            return self.report.describe(self.forecast.credit, details, blocks)
        return {"disabled": self.report.disabled}

    def after_decode(self, reqs: Sequence[Request]) -> int:
        """Called after a decode step. Every ``interval``-th call polls (:meth:`_poll`).

        Returns by how much :attr:`_to_have` grew, in slots.
        """
        if self.holds:
            return 0
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
            if self.stats.blocks_compared > compared:
                self.report.publish(elapsed)
            elif self._decode_steps % (_METRICS_INTERVAL * self.interval) == 0:
                self.report.publish()
        return self._to_have - before

    @property
    def _to_have(self) -> int:
        """Slots saved now, plus slots that the ledger (accepted blocks that do not share yet) can free."""
        return self.report.slots_saved + self.pipeline.ledger.slots

    def shareable(self) -> int:
        """Slots that the blocks of the ledger can free: the smallest number of any rank. All ranks call
        this together."""
        least = 0

        def ask() -> None:
            nonlocal least
            least = self.tracker.ranks.least(self.pipeline.ledger.slots)

        if self._is_active and self.report.disabled is None:
            self.containment.together(ask)
        return least if self.report.disabled is None else 0

    def reclaim(self, wanted: int) -> None:
        """Free ``wanted`` slots when SGLang is short of slots and its prefix cache has nothing left to evict.
        First blocks share, then policies with ``when=short`` evict. All ranks call this together, because all
        ranks have the same number of free slots."""
        if self._is_active and self.report.disabled is None:
            self.containment.together(self._reclaim, wanted)

    def _reclaim(self, wanted: int) -> None:
        start = time.perf_counter()
        self.stats.shortages += 1
        missing = wanted - self.pipeline.reclaim(wanted)
        # Policies with ``when=short`` free slots that sharing could not free, beginning with the longest rows.
        running = self._running.values() if self.eviction.waits else ()
        for req in sorted(running, key=lambda req: -req.kv.kv_allocated_len):
            if missing <= 0:
                break
            if is_running(req):
                state, before = self.tracker.follow(req), self.stats.slots_freed_by_eviction
                self._evict(req, state, self.eviction.give, missing)
                missing -= self.stats.slots_freed_by_eviction - before
        self.stats.scheduler_seconds += time.perf_counter() - start

    def _poll(self, reqs: Sequence[Request]) -> None:
        """Measure the blocks that the filter process found (with ``when=always`` they also share), hand new
        tokens to the filter, then evict. The filter has until the next poll to compare these tokens."""
        self.pipeline.advance()
        running = [req for req in reqs if is_running(req)]
        self._running = {id(req): req for req in running}
        logical = output = 0
        # Admission reserves slots for output only, so evicted positions of prompts do not count.
        saved = self.pipeline.saved
        for req in running:
            state = self.tracker.follow(req)
            if state.row is None:
                state.row = self.pipeline.redirector.row_of(req)
                if state.followed is not None:
                    state.followed.join(True)
            if state.pending:
                self.pipeline.requeue(req, state)
            logical += req.kv.kv_allocated_len
            output += len(req.output_ids)
            saved += len(state.row.evicted_from(len(req.origin_input_ids)))
        self.tracker.feed(running)
        self.stats.poll(len(running), self.report.slots_saved, logical, self.pipeline.across)
        expected = self.pipeline.expected(map(self.tracker.follow, running))
        self.forecast.poll(saved + expected, output)
        if self.eviction.is_active:
            # After a retraction a row has its full size until its blocks share again. Policies are not asked
            # before that, because they would evict too much.
            returning = self.pipeline.returning()
            for req in running:
                ask = id(req) not in returning
                self._evict(req, self.tracker.follow(req), self.eviction.poll, None, ask)

    def after_prefill(self, reqs: Sequence[Request], written: Iterable[int]) -> int:
        """Let policies evict after prompts, or chunks of prompts, were computed. ``written``: for each of
        ``reqs``, how many positions have their KV written. Returns how many slots were freed."""
        before = self.report.slots_saved
        if self.eviction.evicts_prompts and self.report.disabled is None:
            self.containment.together(self._poll_prompts, reqs, written)
        return self.report.slots_saved - before

    def _poll_prompts(self, reqs: Sequence[Request], written: Iterable[int]) -> None:
        start = time.perf_counter()
        for req, positions in zip(reqs, written, strict=True):
            if is_running(req) and self.keeps_prompt(req):
                self._evict(req, self.tracker.follow(req), self.eviction.poll, positions)
        self.stats.scheduler_seconds += time.perf_counter() - start

    def _evict(
        self, req: Request, state: RequestState, work: Callable[..., Any], *arguments: object
    ) -> None:
        """Call ``work``, a method of ``eviction``. Then drop blocks of the ledger that lost positions."""
        if state.takes_part:
            evicted = self.stats.positions_evicted
            work(req, state, *arguments)
            if self.stats.positions_evicted > evicted:
                self.pipeline.evicted(req)
