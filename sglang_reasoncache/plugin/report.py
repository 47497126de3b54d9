# SPDX-License-Identifier: Apache-2.0
"""What operators see: ``GET /reasoncache``, a part of SGLang's log line, Prometheus."""

from __future__ import annotations

import collections
from typing import Any, Protocol

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.metrics import SharingMetrics
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.state import RequestState
from sglang_reasoncache.sharing.stats import SharingStats

#: Finished requests whose shared runs the endpoint can show.
_RECENT_REQUESTS = 32
#: Shared blocks listed for one of them.
_RECENT_BLOCKS = 1024


class Selection(Protocol):
    def recent(self) -> dict[str, Any]: ...
    def describe(self) -> dict[str, Any]: ...


class Report:
    """One per scheduler. ``metrics`` is None without ``--enable-metrics``, ``selection`` where no
    policy selects what is read."""

    def __init__(
        self,
        config: ReasonCacheConfig,
        stats: SharingStats,
        pipeline: BlockPipeline,
        eviction: EvictionController,
        metrics: SharingMetrics | None = None,
        selection: Selection | None = None,
    ) -> None:
        self._config, self._stats = config, stats
        self._pipeline, self._eviction = pipeline, eviction
        self._metrics, self._selection = metrics, selection
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=_RECENT_REQUESTS)

    def request_finished(
        self, req: Request, state: RequestState, shared: int, evicted: int
    ) -> None:
        """``shared``, ``evicted``: positions of its row."""
        prompt, output = len(req.origin_input_ids), len(req.output_ids)
        self._stats.request_finished(shared, prompt + output, evicted)
        self._recent.append(
            {
                "rid": req.rid,
                "prompt_tokens": prompt,
                "output_tokens": output,
                "shared_positions": shared,
                "evicted_positions": evicted,
                "retractions": req.retraction_count,
                "block": self._pipeline.block,
                "blocks": state.shared[:_RECENT_BLOCKS],
                "evictions": list(state.evicted.history),
            }
        )

    def publish(self, latency: float | None = None) -> None:
        """``latency``: seconds of a poll that compared blocks."""
        if self._metrics is not None:
            evicted = self._eviction.positions_now
            saved = self._pipeline.live_positions + evicted
            self._metrics.update(self._stats, saved, evicted, latency)

    def publish_selection(self) -> None:
        if self._metrics is not None and self._selection is not None:
            self._metrics.update_selection(self._selection.recent())

    def reset(self) -> None:
        self._recent.clear()

    def describe(self, credit: float) -> dict[str, Any]:
        """JSON for the endpoint. ``credit``: share of future output that admission counts on."""
        evicted = self._eviction.positions_now
        return {
            "config": self._config.to_dict(),
            "block": self._pipeline.block,
            "slots_saved_now": self._pipeline.live_positions + evicted,
            "positions_evicted_now": evicted,
            "evictors": self._eviction.described,
            "selection": None if self._selection is None else self._selection.describe(),
            "admission_credit": credit,
            "threshold": self._pipeline.threshold.describe(),
            "distances": self._pipeline.meter.backend,
            "totals": self._stats.to_dict(),
            "recent": list(self._recent),
        }

    def log_part(self) -> str:
        """A few words for SGLang's decode log line."""
        shared, evicted = self._pipeline.live_positions, self._eviction.positions_now
        return f"#shared token: {shared}, #evicted token: {evicted}"
