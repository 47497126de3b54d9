# SPDX-License-Identifier: Apache-2.0
"""Prometheus series beside SGLang's own; created only under ``--enable-metrics``.

Import this module's class after SGLang has set ``PROMETHEUS_MULTIPROC_DIR``
(it does so before it starts the scheduler): the client picks its mode then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_reasoncache.sharing.stats import SharingStats

_PREFIX = "sglang:reasoncache_"

#: Stats field -> help of the counter ``sglang:reasoncache_<field>_total``.
_COUNTERS = {
    "steps_seen": "Reasoning steps finished.",
    "steps_with_candidate": "Steps with at least one similar earlier step.",
    "steps_shed": "Finished steps not looked at, because too many were waiting.",
    "filter_restarts": "Times the process that compares steps failed and was started anew.",
    "structure_refusals": "Candidates refused because their formal content differs.",
    "blocks_compared": "Block pairs whose KV distance was measured.",
    "blocks_shared": "Blocks redirected to earlier slots.",
    "slots_saved_total": "Slots returned to the allocator by sharing.",
    "requests_opted_out": "Requests served without sharing or evicting.",
    "eviction_decisions": "Times an evicting policy was asked what to evict.",
    "positions_evicted": "Positions evicted by evicting policies.",
    "slots_freed_by_eviction": "Slots returned to the allocator by evicting.",
}
#: Likewise, of what a selecting policy reads: ``sglang:reasoncache_selection_<field>_total``.
_SELECTION = {
    "positions_held": "Positions of the rows that were selected from, summed over layers and steps.",
    "positions_read": "Those that attention read.",
}


class SharingMetrics:
    """Mirrors :class:`SharingStats`, and what was selected, into Prometheus.

    Args:
        labels: SGLang's scheduler labels (model name, rank).
    """

    def __init__(self, labels: dict[str, Any]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = {key: str(value) for key, value in labels.items()}
        names = list(self._labels)
        self._counters = {
            field: Counter(_PREFIX + field.removesuffix("_total"), text, names)
            for field, text in _COUNTERS.items()
        }
        self._refusals = Counter(
            _PREFIX + "refusals", "Blocks not shared, by reason.", [*names, "reason"]
        )
        self._eviction_refusals = Counter(
            _PREFIX + "eviction_refusals",
            "Runs of positions not evicted, by reason.",
            [*names, "reason"],
        )
        self._saved_now = Gauge(
            _PREFIX + "slots_saved_now",
            "Slots the running requests do without.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._evicted_now = Gauge(
            _PREFIX + "positions_evicted_now",
            "Evicted positions of the running requests.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._ratio = Gauge(
            _PREFIX + "memory_saving_ratio",
            "Slots saved over logical slots, averaged over decode steps.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._given_up = Gauge(
            _PREFIX + "filter_given_up",
            "1 when the process that compares steps failed too often: no further blocks are shared.",
            names,
            multiprocess_mode="mostrecent",
        )
        self._latency = Histogram(
            _PREFIX + "filter_seconds",
            "Scheduler time spent on a decode step that had blocks to share.",
            names,
            buckets=(0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        )
        self._selected = {
            field: Counter(_PREFIX + "selection_" + field, text, names)
            for field, text in _SELECTION.items()
        }
        self._selection_refusals = Counter(
            _PREFIX + "selection_refusals",
            "Answers of a selecting policy that were not used as they were, by reason.",
            [*names, "reason"],
        )
        self._seen: dict[str, int] = {}

    def update(
        self, stats: SharingStats, saved_now: int, evicted_now: int, latency: float | None
    ) -> None:
        """Publish totals; ``latency`` in seconds, None where nothing was filtered."""
        for field, counter in self._counters.items():
            self._advance(counter.labels(**self._labels), field, getattr(stats, field))
        for kind, counter, counts in (
            ("refusal:", self._refusals, stats.refusals),
            ("evict:", self._eviction_refusals, stats.eviction_refusals),
        ):
            for reason, count in counts.items():
                self._advance(counter.labels(**self._labels, reason=reason), kind + reason, count)
        self._evicted_now.labels(**self._labels).set(evicted_now)
        self._saved_now.labels(**self._labels).set(saved_now)
        self._ratio.labels(**self._labels).set(stats.memory_saving_ratio)
        self._given_up.labels(**self._labels).set(stats.filter_given_up)
        if latency is not None:
            self._latency.labels(**self._labels).observe(latency)

    def update_selection(self, described: Mapping[str, Any]) -> None:
        """Publish what ``describe()`` of a selection says."""
        for field, counter in self._selected.items():
            key = f"selection:{field}"
            self._advance(counter.labels(**self._labels), key, described[field])
        for reason, count in described["refusals"].items():
            labelled = self._selection_refusals.labels(**self._labels, reason=reason)
            self._advance(labelled, f"selection_refusal:{reason}", count)

    def _advance(self, counter: Any, key: str, total: int) -> None:
        seen = self._seen.get(key, 0)
        # A flush restarts our totals; a Prometheus counter only ever grows.
        counter.inc(total - seen if total >= seen else total)
        self._seen[key] = total
