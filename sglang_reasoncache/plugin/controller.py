# SPDX-License-Identifier: Apache-2.0
"""The controller of a scheduler process. It *polls* (looks at) the running requests every few decode steps, has
their blocks share slots, has policies evict positions, and reports."""

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
#: While polls compare no blocks, the Prometheus series are updated once in this many polls.
_METRICS_INTERVAL = 8


@dataclass(eq=False)
class Controller:
    """SGLang's scheduler (through hooks), our allocator and our prefix tree call the controller. Its public
    methods let no exception through (see ``containment.py``).

    In the controller, tensor-parallel ranks exchange numbers only inside :meth:`Containment.together`. All
    ranks call that method at the same points, because the events that lead to a call are the same on all
    ranks: decode steps, prefills, admissions and shortages of slots.

    Attributes:
        config: The settings, with ``positions=auto`` already replaced.
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
        #: True from a DP attention vote on the next forward until that forward is built. No poll runs then.
        self.holds = False
        #: The requests that ran at the last poll, by Python ``id``, without those released since.
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
        evict positions of the prompt: slots of a prompt that is in the tree belong to the tree."""
        return self.eviction.evicts_prompts and takes_part(req)

    def after_chunk(self, req: Request, written: int) -> None:
        """Called when a chunk of a prompt was computed. Lets policies evict positions if :meth:`keeps_prompt`
        is true. ``written``: number of positions of ``req`` whose KV is written."""
        if self.report.disabled is None:
            self.containment.together(self._poll_prompts, (req,), (written,))

    def on_release(self, req: Request, row: HostRow) -> None:
        """Account for a finished, aborted or retracted request. ``row``: our copy of its freed block table."""
        with self.containment:
            self._on_release(req, state_of(req), row)

    def _on_release(self, req: Request, state: RequestState | None, row: HostRow) -> None:
        # ``forget`` is called before code that can fail: SGLang's slot check needs the new ``positions_now``.
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
        """Count a finished request unless it was aborted, and let the filter forget it. ``evicted``: evicted
        positions in ``row``. ``expected``: slots that blocks not shared so far could have freed (estimate)."""
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
        """Start anew. SGLang calls this when it flushes its cache, while no request runs. Distances
        measured so far are dropped: a request that SGLang retracted for a pause may go on with new weights."""
        with self.containment:
            if self.report.disabled is None:
                self.forecast = SharingForecast(self.config.admission_credit)
            self.pipeline.reset()
            self.eviction.reset()
            self.stats.reset()
            self.tracker.reset()
            self.report.clear()

    def describe(self, details: bool = False, blocks: bool = True) -> dict[str, Any]:
        """JSON for ``GET /reasoncache``, from :meth:`Report.describe`. If that method fails, the JSON has only
        the field ``disabled``."""
        with self.containment:
            return self.report.describe(self.forecast.credit, details, blocks)
        return {"disabled": self.report.disabled}

    def after_decode(self, reqs: Sequence[Request]) -> int:
        """Called after a decode step. Every ``interval``-th call polls (:meth:`_poll`). Returns how many slots
        more than before the poll are saved or can be freed (:attr:`_to_have`)."""
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
        """How many slots the blocks of the ledger can free on every rank. All ranks call this together."""
        least = 0

        def ask() -> None:
            nonlocal least
            least = self.tracker.ranks.least(self.pipeline.ledger.slots)

        if self._is_active and self.report.disabled is None:
            self.containment.together(ask)
        return least if self.report.disabled is None else 0

    def reclaim(self, wanted: int) -> None:
        """Try to free ``wanted`` slots, which SGLang lacks even if its prefix cache evicts all that it can.
        First, blocks share. If slots are still missing, policies with ``when=short`` evict positions. All ranks
        call this together, because all ranks have the same number of free slots."""
        if self._is_active and self.report.disabled is None:
            self.containment.together(self._reclaim, wanted)

    def _reclaim(self, wanted: int) -> None:
        start = time.perf_counter()
        self.stats.shortages += 1
        missing = wanted - self.pipeline.reclaim(wanted)
        # If sharing freed too few slots, policies with ``when=short`` evict, from the longest requests first.
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
        """Measure the blocks that the filter process found; with ``when=always``, let accepted blocks share.
        Hand new tokens to the filter, whose results a later poll takes. Then have policies evict positions."""
        self.pipeline.advance()
        running = [req for req in reqs if is_running(req)]
        self._running = {id(req): req for req in running}
        logical = output = 0
        # Admission's forecast is about output only, so ``saved`` leaves out evicted positions of prompts.
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
        """Called after prompts, or chunks of prompts, were computed. Lets policies evict positions. Returns how
        many slots were freed. ``written``: for each of ``reqs``, number of positions whose KV is written."""
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
        """If ``req`` takes part, call ``work``, a method of ``eviction``. Then remove blocks from the ledger
        that contain or would read an evicted position."""
        if state.takes_part:
            evicted = self.stats.positions_evicted
            work(req, state, *arguments)
            if self.stats.positions_evicted > evicted:
                self.pipeline.evicted(req)
