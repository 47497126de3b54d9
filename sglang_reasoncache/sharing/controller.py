# SPDX-License-Identifier: Apache-2.0
"""One per scheduler process: follows the running requests' tokens and applies decisions.

Called after each decode step has been processed, between two forwards. New
tokens go to the step engine; what it proposed meanwhile is measured in one pass
over the pool, judged, and applied when the distances have arrived. Nothing here
waits for any of it, and no request does.
"""

from __future__ import annotations

import bisect
import collections
import logging
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from sglang_reasoncache import compat
from sglang_reasoncache.cache.admission import SharingForecast
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.filter.engine import StepEngine
from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.filter.span import ReasoningMarkers
from sglang_reasoncache.metrics import SharingMetrics
from sglang_reasoncache.selection.device_selection import DeviceSelection
from sglang_reasoncache.selection.page_selection import PageSelection
from sglang_reasoncache.sharing import state as request_state
from sglang_reasoncache.sharing.acceptor import Acceptor, refusal_of
from sglang_reasoncache.sharing.calibrated import CalibratedThreshold
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement
from sglang_reasoncache.sharing.state import Followed, RequestState
from sglang_reasoncache.sharing.stats import SharingStats

logger = logging.getLogger(__name__)

#: Decode steps between two looks at the requests. A step of a response has some
#: 25 tokens, so little is lost; looking costs the scheduler a microsecond a request.
INTERVAL = 4
#: Finished requests whose shared runs the endpoint can show.
_RECENT_REQUESTS = 32
#: Shared blocks listed for one of them.
_RECENT_BLOCKS = 1024
#: Replies taken from the engine at once, unless their blocks make a wave before.
_TAKE_LIMIT = 256
#: Blocks measured at once, and about as many applied in one look at the requests: the
#: scheduler must not stall when many steps end together.
_MAX_WAVE = 256
#: Looks at the requests between two updates of the Prometheus series when nothing is shared.
_METRICS_INTERVAL = 8
#: Key in the OpenAI API's ``custom_params`` that switches sharing off for a request.
OPT_OUT_KEY = "reasoncache"


class _Flight(NamedTuple):
    """A wave whose distances are on their way."""

    wave: list[BlockProposal]
    measured: Measurement


class SharingController:
    """Owns request state, counters and the admission forecast.

    Args:
        config: Resolved settings (``positions`` is not ``auto``).
        block: Tokens per block, the page size when that is above 1.
        engine: Compares steps.
        threshold: Judges distances.
        meter: Reads the pool.
        acceptor: Applies decisions.
        dropper: Asks the evicting policies.
        metrics: Prometheus series, None without ``--enable-metrics``.
        markers: Tokens around the reasoning part; None: all output may share.
        agree: The least of all tensor-parallel ranks' values; they call it together.
        interval: Decode steps between two looks at the requests.
    """

    def __init__(
        self,
        config: ReasonCacheConfig,
        block: int,
        engine: StepEngine,
        threshold: CalibratedThreshold,
        meter: BlockMeter,
        acceptor: Acceptor,
        eviction: EvictionController,
        metrics: SharingMetrics | None,
        markers: ReasoningMarkers | None = None,
        agree: Callable[[int], int] = lambda value: value,
        interval: int = INTERVAL,
    ) -> None:
        self.config = config
        self.block = block
        self.threshold = threshold
        self.stats = SharingStats()
        self.forecast = SharingForecast(config.admission_credit)
        self.live_positions = 0
        #: Of the attention backend, where a policy selects what is read.
        self.selection: PageSelection | DeviceSelection | None = None
        self._engine = engine
        self._meter = meter
        self._acceptor = acceptor
        self._eviction = eviction
        self._metrics = metrics
        self._markers = markers
        self._agree = agree
        self._interval = interval
        self._decode_steps = 0
        self._shed_before = 0
        # Engine ids of requests that disappeared; any thread may append one.
        self._orphans: collections.deque[int] = collections.deque()
        self._waves: collections.deque[list[BlockProposal]] = collections.deque()
        self._flight: _Flight | None = None
        # Engine id -> SGLang's request, as long as that lives.
        self._requests: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=_RECENT_REQUESTS)

    @property
    def saved_positions(self) -> int:
        """Slots that the running requests do without, less than one a position."""
        return self.live_positions + self._eviction.positions_now

    # -- asked by the tree ----------------------------------------------------

    @staticmethod
    def state_of(req: Any) -> RequestState | None:
        return request_state.state_of(req)

    @staticmethod
    def allows(req: Any) -> bool:
        """False when the request opted out: it keeps its row, and reads no approximations."""
        params = getattr(req.sampling_params, "custom_params", None)
        return not (isinstance(params, dict) and params.get(OPT_OUT_KEY) is False)

    def keeps_prompt(self, req: Any) -> bool:
        """Whether a running request's prompt is its own, so that positions of it may go."""
        return self._eviction.evicts_prompts and self._serves(req)

    def after_chunk(self, req: Any, written: int) -> None:
        """A chunk of a prompt that is the request's own has been computed; the next one has no
        slots yet.

        ``written``: positions whose KV is there when the device has done what is queued.
        """
        start = time.perf_counter()
        self._eviction.wait()
        self._evict_some(req, request_state.state_of(req) or self._admit(req), written)
        self.stats.scheduler_seconds += time.perf_counter() - start

    def on_release(self, req: Any) -> None:
        """The row is gone; called for finished, aborted and retracted requests alike."""
        state = request_state.state_of(req)
        ended = req.finished() and not isinstance(req.finished_reason, compat.FINISH_ABORT)
        if state is None:
            if ended:
                self._note_unfollowed(req)
            return
        shared, state.live_positions = state.live_positions, 0
        self.live_positions -= shared
        evicted = self._eviction.forget(state)
        if ended and state.served:
            of_output = state.evicted.count_from(len(req.origin_input_ids))
            self.forecast.observe(shared + of_output, len(req.output_ids))
            self._note_finished(req, state, shared, evicted)
        if req.finished() and state.followed is not None:
            state.followed.close()
        state.forget_row()
        if shared + evicted and not self.saved_positions and self._metrics is not None:
            self._metrics.update(self.stats, 0, 0, None)

    def reset(self) -> None:
        """The cache was flushed; SGLang does that only when nothing runs."""
        self.live_positions = 0
        self._eviction.reset()
        self.stats = SharingStats()
        self._shed_before = self._engine.steps_shed
        self._recent.clear()
        self._waves.clear()
        self._flight = None

    # -- a decode step --------------------------------------------------------

    def after_decode(self, reqs: Sequence[Any]) -> int:
        """Look at what processed batches added to decoding ``reqs``; share and evict what is ready.

        Returns:
            Slots that came back to the allocator.
        """
        self._decode_steps += 1
        if self._decode_steps % (_METRICS_INTERVAL * self._interval) == 0:
            self._publish_selection()
        if not self.config.is_active:
            return 0
        self.stats.decode_steps += 1
        if self._decode_steps % self._interval:
            return 0
        start = time.perf_counter()
        before, blocks_before = self.saved_positions, self.stats.blocks_compared
        # In this order the engine has had some decode steps for what it was fed, so a
        # response is shared at the same tokens in every run, unless the machine is short.
        self._advance()
        self._feed(reqs)
        self._evict(reqs)
        elapsed = time.perf_counter() - start
        self.stats.scheduler_seconds += elapsed
        compared = self.stats.blocks_compared > blocks_before
        if self._metrics is not None and (
            compared or self._decode_steps % (_METRICS_INTERVAL * self._interval) == 0
        ):
            self._metrics.update(
                self.stats,
                self.saved_positions,
                self._eviction.positions_now,
                elapsed if compared else None,
            )
        self.threshold.maybe_save()
        return self.saved_positions - before

    def _publish_selection(self) -> None:
        if self.selection is not None and self._metrics is not None:
            self._metrics.update_selection(self.selection.recent())

    def after_prefill(self, reqs: Sequence[Any], written: Sequence[int]) -> int:
        """Look at requests whose prompts, or chunks of them, were computed up to ``written``.

        Returns:
            Slots that came back to the allocator.
        """
        start, before = time.perf_counter(), self.saved_positions
        for req, positions in zip(reqs, written, strict=True):
            if _is_running(req) and self.keeps_prompt(req):
                state = request_state.state_of(req) or self._admit(req)
                self._evict_some(req, state, positions)
        self.stats.scheduler_seconds += time.perf_counter() - start
        return self.saved_positions - before

    def _feed(self, reqs: Sequence[Any]) -> None:
        """Hand the requests' new tokens to the engine."""
        while self._orphans:
            self._engine.close(self._orphans.popleft())
        running = logical = output = 0
        # Admission holds nothing back for prompts, so what they give up is not to be counted on.
        saved = self.live_positions
        ids, counts, tokens = array("q"), array("q"), array("q")
        for req in reqs:
            if not _is_running(req):
                continue
            running += 1
            logical += req.kv.kv_allocated_len
            output += len(req.output_ids)
            state = request_state.state_of(req) or self._admit(req)
            saved += state.evicted.count_from(len(req.origin_input_ids))
            if state.followed is None:
                continue
            if state.reapply:
                self._reapply(req, state)
            # The newest token's KV is not written before the next forward.
            ready = len(req.output_ids) - 1
            if ready > state.fed:
                ids.append(state.followed.id)
                counts.append(ready - state.fed)
                tokens.extend(req.output_ids[state.fed : ready])
                state.fed = ready
        if ids:
            self._engine.feed(ids, counts, tokens)
        self.stats.steps_shed = self._engine.steps_shed - self._shed_before
        self.stats.filter_restarts = self._engine.restarts
        self.stats.filter_given_up = int(self._engine.given_up)
        self.stats.poll(running, self.saved_positions, logical)
        self.forecast.poll(saved, output)

    def _evict(self, reqs: Sequence[Any]) -> None:
        """Have the policies look at every request that did not opt out."""
        if not self._eviction.is_active:
            return
        # Until all blocks of a recomputed row are applied again it takes slots that policies
        # need not ask for.
        waiting = [*self._waves, *([self._flight.wave] if self._flight else [])]
        share_again = {id(block.req) for wave in waiting for block in wave if block.decided}
        for req in self._eviction.in_turn(req for req in reqs if _is_running(req)):
            state = request_state.state_of(req)
            if state is not None:
                self._evict_some(req, state, ask=id(req) not in share_again)

    def _evict_some(
        self, req: Any, state: RequestState, written: int | None = None, ask: bool = True
    ) -> None:
        if not state.served:
            return
        done = self._eviction.poll(req, state, self.stats, written, ask)
        # What did not come back has another name: one reference less to count.
        state.live_positions -= done.positions - done.freed
        self.live_positions -= done.positions - done.freed

    def _admit(self, req: Any) -> RequestState:
        """Start to follow a request, if it may share."""
        self.stats.requests_seen += 1
        followed = None
        served = self._serves(req)
        if not served:
            self.stats.requests_opted_out += 1
        elif self.config.shares:
            prompt = req.origin_input_ids
            inside = self._markers is None or self._markers.inside_after(prompt)
            try:
                followed = Followed(self._engine, len(prompt), inside, self._orphans)
            except MemoryError:
                logger.warning("reasoncache: no memory to follow request %s", req.rid)
            else:
                self._requests[followed.id] = req
        return request_state.attach(req, RequestState(followed, served))

    def _serves(self, req: Any) -> bool:
        """Whether a request's row may be touched at all."""
        return (
            self.allows(req)
            and req.beam_group is None
            and req.multimodal_inputs is None
            and req.input_embeds is None
        )

    def _reapply(self, req: Any, state: RequestState) -> None:
        """Recomputed after a retraction: the row holds nothing shared, the decisions stand."""
        state.reapply = False
        blocks = [
            BlockProposal(req, dst, src, self.block, state.row, decided=True)
            for dst, src in state.shared
        ]
        state.shared = []
        self._queue(blocks)

    def _queue(self, blocks: Sequence[BlockProposal]) -> None:
        """Append one request's blocks, oldest first, to the waves that wait."""
        waves: list[list[BlockProposal]] = []
        queue(blocks, waves)
        self._append(waves)

    def _append(self, waves: Iterable[list[BlockProposal]]) -> None:
        for wave in waves:
            self._waves.extend(wave[i : i + _MAX_WAVE] for i in range(0, len(wave), _MAX_WAVE))

    def _advance(self) -> None:
        """Bring proposals as far as they come without waiting, or ``_MAX_WAVE`` blocks far.

        One wave at a time is measured, so the rows it was located in stay as they
        are until it is applied. Meanwhile steps pile up in the engine, which sheds.
        """
        landed = 0
        while True:
            flight = self._flight
            if flight is not None:
                if not flight.measured.is_immediate and not self._agree(flight.measured.ready()):
                    return
                self._flight = None
                self._land(flight)
                landed += len(flight.wave)
            if landed >= _MAX_WAVE:
                return
            if not self._waves and not self._collect():
                return
            if not self._take_off():
                # What was collected had no blocks, or came too late; it took some time too.
                landed += 1

    def _take_off(self) -> bool:
        """Measure the next wave; False when none waits."""
        while self._waves:
            wave = self._allowed(self._waves.popleft())
            if wave:
                self._flight = _Flight(wave, self._meter.measure(wave))
                return True
        return False

    def _collect(self) -> bool:
        """Queue the blocks of steps that the engine has compared; False when there are none."""
        if not self._engine.outstanding:
            return False
        per_request: dict[int, list[BlockProposal]] = {}
        ready = self._agree(self._engine.ready())
        if ready < 0:
            # On some rank, so on all: they forget the same requests at the same poll.
            self._engine.restart()
            return False
        results = self._engine.take(min(ready, _TAKE_LIMIT), _MAX_WAVE)
        for result in results:
            self._count(result)
            req = self._requests.get(result.request)
            state = None if req is None else request_state.state_of(req)
            if state is None:
                self.stats.refusals[Refusal.LATE.value] += len(result.pairs)
                continue
            # Refused here as well as later: which requests still exist may differ
            # between ranks, and the waves they make must not.
            blocks = per_request.setdefault(result.request, [])
            for block in self._allowed(
                BlockProposal(req, pair.dst_start, pair.src_start, self.block, state.row)
                for pair in result.pairs
            ):
                if state.claim(block.dst_start, block.length):
                    blocks.append(block)
                else:
                    self._refuse(block, Refusal.OVERLAP)
        waves: list[list[BlockProposal]] = []
        for blocks in per_request.values():
            queue(blocks, waves)
        self._append(waves)
        return bool(results)

    def _count(self, result: StepResult) -> None:
        seen = result.counters
        self.stats.steps_seen += 1
        self.stats.filter_seconds += result.seconds
        self.stats.steps_with_candidate += bool(seen.candidates)
        self.stats.structure_refusals += seen.dropped_structure
        self.stats.over_bound_steps += seen.over_bound

    def _allowed(self, blocks: Iterable[BlockProposal]) -> list[BlockProposal]:
        allowed = []
        for block in blocks:
            refusal = self._refusal(block)
            if refusal is None:
                allowed.append(block)
            else:
                self._refuse(block, refusal)
        return allowed

    def _refuse(self, block: BlockProposal, refusal: Refusal) -> None:
        self.stats.refusals[refusal.value] += 1
        state = request_state.state_of(block.req)
        if block.decided and refusal is Refusal.LATE and state is not None:
            # Retracted once more before it was applied: the decision stands.
            state.shared.append((block.dst_start, block.src_start))

    def _refusal(self, block: BlockProposal) -> Refusal | None:
        req = block.req
        state = request_state.state_of(req)
        if (
            state is None
            or state.row != block.row
            # Being recomputed: positions may not even have slots yet.
            or state.reapply
            or req.finished()
            or req.is_retracted
            or not req.kv.holds_kv
        ):
            return Refusal.LATE
        return refusal_of(block, len(req.origin_input_ids) + len(req.output_ids) - 1, state.evicted)

    def _land(self, flight: _Flight) -> None:
        """Judge and apply a measured wave."""
        wave, measured = flight
        # Every rank adds up the sums of the whole wave before any block is left out.
        distances = self._meter.distances(measured)
        chosen, fresh = [], []
        for i, block in enumerate(wave):
            refusal = self._refusal(block)
            if refusal is not None:
                self._refuse(block, refusal)
            elif block.decided:
                chosen.append(i)
            else:
                fresh.append(i)
        self.stats.blocks_compared += len(fresh)
        verdicts = self._acceptor.judge([distances[i] for i in fresh], self.threshold.threshold)
        for i, refusal in zip(fresh, verdicts, strict=True):
            if refusal is None:
                chosen.append(i)
            else:
                self.stats.refusals[refusal.value] += 1
        for i, changed in zip(chosen, self._acceptor.apply(chosen, measured), strict=True):
            if changed:
                self._note_shared(wave[i])
            else:
                self.stats.refusals[Refusal.SAME_SLOTS.value] += 1

    def _note_shared(self, block: BlockProposal) -> None:
        state = request_state.state_of(block.req)
        assert state is not None, "only requests with state propose blocks"
        state.shared.append((block.dst_start, block.src_start))
        state.mark_shared(block.dst_start)
        if block.decided:
            self.stats.blocks_reapplied += 1
        else:
            self.stats.blocks_shared += 1
        if self.config.apply == "alias":
            state.slot_aliases.share(block.dst_start, block.src_start, block.length)
            state.live_positions += block.length
            self.live_positions += block.length
            self.stats.slots_saved_total += block.length

    # -- what happened --------------------------------------------------------

    def _note_unfollowed(self, req: Any) -> None:
        """A request that ended between two looks."""
        self.stats.requests_seen += 1
        if self._serves(req):
            self.stats.request_finished(0, len(req.origin_input_ids) + len(req.output_ids))
        else:
            self.stats.requests_opted_out += 1

    def _note_finished(self, req: Any, state: RequestState, shared: int, evicted: int) -> None:
        length = len(req.origin_input_ids) + len(req.output_ids)
        self.stats.request_finished(shared, length, evicted)
        self._recent.append(
            {
                "rid": req.rid,
                "prompt_tokens": len(req.origin_input_ids),
                "output_tokens": len(req.output_ids),
                "shared_positions": shared,
                "evicted_positions": evicted,
                "retractions": req.retraction_count,
                "block": self.block,
                "blocks": state.shared[:_RECENT_BLOCKS],
                "evictions": list(state.evicted.history),
            }
        )

    def describe(self) -> dict[str, Any]:
        """JSON for the endpoint: settings, totals, and the last finished requests."""
        return {
            "config": self.config.to_dict(),
            "block": self.block,
            "slots_saved_now": self.saved_positions,
            "positions_evicted_now": self._eviction.positions_now,
            "evictors": self._eviction.describe(),
            "selection": None if self.selection is None else self.selection.describe(),
            "admission_credit": self.forecast.credit,
            "threshold": self.threshold.describe(),
            "distances": self._meter.backend,
            "totals": self.stats.to_dict(),
            "recent": list(self._recent),
        }

    def log_part(self) -> str:
        """A few words for SGLang's decode log line."""
        return (
            f"#shared token: {self.live_positions}, #evicted token: {self._eviction.positions_now}"
        )


def _is_running(req: Any) -> bool:
    return not req.finished() and not req.is_retracted and req.kv.holds_kv


def queue(blocks: Sequence[BlockProposal], waves: list[list[BlockProposal]]) -> None:
    """Distribute one request's ``blocks``, oldest first and of one length, over ``waves``.

    A block whose source was redirected by another block of the same call must
    be located after that one was applied, or it would share a freed slot.
    """
    # Destinations so far, sorted, and the wave of each. They do not overlap.
    starts: list[int] = []
    wave_of: dict[int, int] = {}
    for block in blocks:
        wave = 0
        first = bisect.bisect_right(starts, block.src_start - block.length)
        for start in starts[first : bisect.bisect_left(starts, block.src_start + block.length)]:
            wave = max(wave, wave_of[start] + 1)
        bisect.insort(starts, block.dst_start)
        wave_of[block.dst_start] = wave
        while len(waves) <= wave:
            waves.append([])
        waves[wave].append(block)
