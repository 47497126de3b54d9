# SPDX-License-Identifier: Apache-2.0
"""One per scheduler process: follows the running requests' tokens and applies decisions.

Called after each decode step has been processed, between two forwards. Requests
hand their new tokens to their filter; what the filter proposes is measured in
one pass over the pool, judged, and applied. No request waits for any of it.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_reasoncache.cache.budget import SharingForecast
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.metrics import SharingMetrics
from sglang_reasoncache.plugin import seams
from sglang_reasoncache.policy.filter import RequestFilter
from sglang_reasoncache.sharing import state as request_state
from sglang_reasoncache.sharing.acceptor import Acceptor, refusal_of
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal
from sglang_reasoncache.sharing.measure import BlockMeter
from sglang_reasoncache.sharing.policy import PolicyFactory
from sglang_reasoncache.sharing.state import RequestState
from sglang_reasoncache.sharing.stats import SharingStats

#: Finished requests whose shared runs the endpoint can show.
_RECENT_REQUESTS = 32
#: Shared blocks listed for one of them.
_RECENT_BLOCKS = 1024
#: Decode steps between two updates of the Prometheus series when nothing is filtered.
_METRICS_INTERVAL = 32
#: Key in the OpenAI API's ``custom_params`` that switches sharing off for a request.
OPT_OUT_KEY = "reasoncache"


class SharingController:
    """Owns request state, counters and the admission forecast.

    Args:
        config: Resolved settings (``positions`` is not ``auto``).
        block: Tokens per block, the page size when that is above 1.
        policy: Makes a filter per request and holds the distance threshold.
        meter: Reads the pool.
        acceptor: Applies decisions.
        metrics: Prometheus series, None without ``--enable-metrics``.
    """

    def __init__(
        self,
        config: ReasonCacheConfig,
        block: int,
        policy: PolicyFactory,
        meter: BlockMeter,
        acceptor: Acceptor,
        metrics: SharingMetrics | None,
    ) -> None:
        self.config = config
        self.block = block
        self.policy = policy
        self.stats = SharingStats()
        self.forecast = SharingForecast(config.admission_credit)
        self.live_positions = 0
        self._meter = meter
        self._acceptor = acceptor
        self._metrics = metrics
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=_RECENT_REQUESTS)

    # -- asked by the tree ----------------------------------------------------

    @staticmethod
    def state_of(req: Any) -> RequestState | None:
        return request_state.state_of(req)

    @staticmethod
    def allows(req: Any) -> bool:
        """False when the request opted out: it neither shares nor reads approximations."""
        params = getattr(req.sampling_params, "custom_params", None)
        return not (isinstance(params, dict) and params.get(OPT_OUT_KEY) is False)

    def on_release(self, req: Any) -> None:
        """The row is gone; called for finished, aborted and retracted requests alike."""
        state = request_state.state_of(req)
        if state is None:
            return
        if req.finished() and not isinstance(req.finished_reason, seams.FINISH_ABORT):
            self._note_finished(req, state)
        self.live_positions -= state.live_positions
        state.forget_row()

    def reset(self) -> None:
        """The cache was flushed; SGLang does that only when nothing runs."""
        self.live_positions = 0
        self.stats = SharingStats()
        self._recent.clear()

    # -- a decode step --------------------------------------------------------

    def after_decode(self, reqs: Sequence[Any]) -> int:
        """Look at what a processed batch added to decoding ``reqs`` and share what is ready.

        Returns:
            Slots that came back to the allocator.
        """
        if not self.config.is_active:
            return 0
        before = self.live_positions
        start = time.perf_counter()
        logical = running = 0
        waves: list[list[BlockProposal]] = []
        for req in reqs:
            if req.finished() or req.is_retracted or not req.kv.holds_kv:
                continue
            running += 1
            logical += req.kv.kv_allocated_len
            state = request_state.state_of(req) or self._admit(req)
            if state.filter is not None:
                self._follow(req, state, state.filter, waves)
        for wave in waves:
            self._share(wave)
        self.stats.decode_step(running, self.live_positions, logical)
        elapsed = time.perf_counter() - start
        self.stats.filter_seconds += elapsed
        if self._metrics is not None and (
            waves or self.stats.decode_steps % _METRICS_INTERVAL == 0
        ):
            self._metrics.update(self.stats, self.live_positions, elapsed if waves else None)
        self.policy.maybe_save()
        return self.live_positions - before

    def _admit(self, req: Any) -> RequestState:
        self.stats.requests_seen += 1
        served = (
            self.allows(req)
            and req.beam_group is None
            and req.multimodal_inputs is None
            and req.input_embeds is None
        )
        if not served:
            self.stats.requests_opted_out += 1
        return request_state.attach(
            req,
            RequestState(
                self.policy.filter_for(req) if served else None, attempt=req.retraction_count
            ),
        )

    def _follow(
        self,
        req: Any,
        state: RequestState,
        step_filter: RequestFilter,
        waves: list[list[BlockProposal]],
    ) -> None:
        """Feed the request's new tokens to its filter and queue what comes back."""
        blocks: list[BlockProposal] = []
        if state.attempt != req.retraction_count:
            # Recomputed after a retraction: the row holds nothing shared, the
            # decisions stand.
            state.attempt = req.retraction_count
            blocks += [
                BlockProposal(req, dst, src, self.block, decided=True) for dst, src in state.shared
            ]
            state.shared = []
        # The newest token's KV is not written before the next forward.
        ready = len(req.output_ids) - 1
        if ready > state.fed:
            new = req.output_ids[state.fed : ready]
            state.fed = ready
            for proposal in step_filter.push(new):
                self._count(proposal)
                blocks += [
                    BlockProposal(req, p.dst_start, p.src_start, self.block) for p in proposal.pairs
                ]
        if blocks:
            written = len(req.origin_input_ids) + ready
            queue(self._allowed(blocks, written), waves)

    def _allowed(self, blocks: Iterable[BlockProposal], written: int) -> list[BlockProposal]:
        allowed = []
        for block in blocks:
            refusal = refusal_of(block, written)
            if refusal is None:
                allowed.append(block)
            else:
                self.stats.refusals[refusal.value] += 1
        return allowed

    def _count(self, proposal: Any) -> None:
        seen = proposal.counters
        self.stats.steps_seen += 1
        self.stats.steps_with_candidate += bool(seen.candidates)
        self.stats.structure_refusals += seen.dropped_structure
        self.stats.over_bound_steps += seen.over_bound

    def _share(self, wave: list[BlockProposal]) -> None:
        """Measure, judge and apply blocks that do not depend on each other."""
        measured = self._meter.locate(wave)
        fresh = [i for i, block in enumerate(wave) if not block.decided]
        chosen = [i for i, block in enumerate(wave) if block.decided]
        if fresh:
            distances = self._meter.distances([wave[i] for i in fresh], measured.select(fresh))
            self.stats.blocks_compared += len(fresh)
            for i, refusal in zip(
                fresh, self._acceptor.judge(distances, self.policy.threshold), strict=True
            ):
                if refusal is None:
                    chosen.append(i)
                else:
                    self.stats.refusals[refusal.value] += 1
        if not chosen:
            return
        blocks = [wave[i] for i in chosen]
        for block, changed in zip(
            blocks, self._acceptor.apply(blocks, measured.select(chosen)), strict=True
        ):
            if changed:
                self._note_shared(block)
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
            state.live_positions += block.length
            self.live_positions += block.length
            self.stats.slots_saved_total += block.length

    # -- what happened --------------------------------------------------------

    def _note_finished(self, req: Any, state: RequestState) -> None:
        if state.filter is None:
            return
        shared = state.live_positions
        length = len(req.origin_input_ids) + len(req.output_ids)
        self.forecast.observe(shared, len(req.output_ids))
        self.stats.request_finished(shared, length)
        self._recent.append(
            {
                "rid": req.rid,
                "prompt_tokens": len(req.origin_input_ids),
                "output_tokens": len(req.output_ids),
                "shared_positions": shared,
                "retractions": req.retraction_count,
                "block": self.block,
                "blocks": state.shared[:_RECENT_BLOCKS],
            }
        )

    def describe(self) -> dict[str, Any]:
        """JSON for the endpoint: settings, totals, and the last finished requests."""
        return {
            "config": self.config.to_dict(),
            "block": self.block,
            "slots_saved_now": self.live_positions,
            "admission_credit": self.forecast.credit,
            "threshold": self.policy.describe(),
            "totals": self.stats.to_dict(),
            "recent": list(self._recent),
        }

    def log_part(self) -> str:
        """A few words for SGLang's decode log line."""
        return f"#shared token: {self.live_positions}"


def queue(blocks: Sequence[BlockProposal], waves: list[list[BlockProposal]]) -> None:
    """Distribute one request's ``blocks``, oldest first, over ``waves``.

    A block whose source was redirected by another block of the same call must
    be located after that one was applied, or it would share a freed slot.
    """
    wave_of: dict[int, int] = {}
    for block in blocks:
        wave = 0
        if wave_of:
            sources = range(block.src_start, block.src_start + block.length)
            wave = max((wave_of[at] + 1 for at in sources if at in wave_of), default=0)
        for at in range(block.dst_start, block.dst_end):
            wave_of[at] = wave
        while len(waves) <= wave:
            waves.append([])
        waves[wave].append(block)
