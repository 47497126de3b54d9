# SPDX-License-Identifier: Apache-2.0
"""Counts what a scheduler process shared and evicted, and the prompts that it composed of cached documents."""

import collections
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_reasoncache.eviction.row_state import EvictionStats, counter


@dataclass
class SharingStats:
    """Totals since the start of the scheduler or the last flush of its cache.

    Attributes:
        eviction: Totals of evicting policies.
        filter_restarts: Restarts of the filter process since the start; not reset by a flush.
        filter_given_up: 1 once the filter process failed too often or was shut down, else 0; a flush keeps it.
        filter_seconds: CPU seconds that the filter process spent on comparing steps.
        scheduler_seconds: Seconds that the scheduler's thread spent on sharing and evicting.
        finished_positions: Positions of finished requests, prompts included.
        finished_redirected, finished_evicted: Those that read another position's slot; those that were evicted.
        sum_saved: Slots saved by sharing and eviction, added up over all polls (one every fourth decode step).
        sum_across: The part of ``sum_saved`` that requests saved by sharing with each other.
    """

    eviction: EvictionStats = field(default_factory=EvictionStats)
    steps_seen: int = counter("Reasoning steps finished.")
    steps_with_candidate: int = counter("Steps with a similar earlier step or an equal run.")
    structure_refusals: int = counter("Candidates refused because their formal content differs.")
    over_bound_steps: int = 0
    steps_shed: int = counter("Finished steps not compared, because too many were waiting.")
    filter_restarts: int = counter("Times the process that compares steps was restarted.")
    filter_given_up: int = 0
    blocks_compared: int = counter("Block pairs judged by their KV distance.")
    blocks_shared: int = counter("Blocks redirected to the slots of their source blocks.")
    slots_saved_total: int = counter("Slots returned to the allocator by sharing.")
    shortages: int = counter("Times SGLang was short of slots with nothing left to evict.")
    blocks_missed: int = counter("Blocks that were counted as shareable and could not share.")
    blocks_shared_across: int = counter("Blocks that read another response to the same prompt.")
    slots_saved_across_total: int = counter("Slots saved by reading another response's slots.")
    filter_seconds: float = 0.0
    scheduler_seconds: float = 0.0
    requests_seen: int = 0
    requests_opted_out: int = counter("Requests served without sharing or eviction.")
    requests_finished: int = 0
    finished_positions: int = 0
    finished_redirected: int = 0
    finished_evicted: int = 0
    blocks_reapplied: int = 0
    requests_swapped: int = counter("Retracted requests whose KV the plugin copied to the host.")
    tokens_swapped_back: int = counter(
        "Tokens whose KV came back from the host, not computed again."
    )
    prompts_continued: int = counter("Prompts that read what earlier responses shared.")
    tokens_continued: int = counter("Tokens of these prompts whose KV is approximate.")
    prompts_composed: int = counter("Prompts composed of documents; a retraction counts one again.")
    documents_composed: int = counter("Cached documents in composed prompts.")
    tokens_composed: int = counter("Tokens of composed prompts read from cache, base included.")
    tokens_repaired: int = counter("Tokens of composed documents that were computed again.")
    repairs_missed: int = counter("Prompts composed without the repair that they asked for.")
    positions_held: int = counter(
        "Positions of rows that a policy selects from, added up over layers and decode steps."
    )
    positions_read: int = counter("Of these positions, those that attention read.")
    decode_steps: int = 0
    polls: int = 0
    sum_running: int = 0
    sum_saved: int = 0
    sum_across: int = 0
    sum_step_ratio: float = 0.0
    sum_final_ratio: float = 0.0
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)

    def reset(self) -> None:
        """Set all totals to 0 in place, because other objects of the scheduler keep references to this one."""
        fresh = SharingStats()
        vars(self.eviction).update(vars(fresh.eviction))
        vars(self).update(vars(fresh) | {"eviction": self.eviction})

    def poll(self, running: int, saved: int, logical: int, across: int = 0) -> None:
        """Count a poll. The ``running`` requests have ``logical`` positions in total and save ``saved`` slots,
        ``across`` of them by sharing with each other."""
        if logical <= 0:
            return
        self.polls += 1
        self.sum_running += running
        self.sum_saved += saved
        self.sum_across += across
        self.sum_step_ratio += saved / logical

    def request_finished(self, redirected: int, logical: int, evicted: int = 0) -> None:
        self.requests_finished += 1
        self.finished_positions += logical
        self.finished_redirected += redirected
        self.finished_evicted += evicted
        if logical > 0:
            self.sum_final_ratio += (redirected + evicted) / logical

    def selected(self, held: int, read: int) -> None:
        """Count what decode steps selected: ``read`` of ``held`` positions."""
        self.positions_held += held
        self.positions_read += read

    def composed(self, documents: int, tokens: int, repaired: int, missed: bool) -> None:
        """Count a prompt composed of ``documents`` cached documents. ``tokens``: how many tokens were read from
        the cache, including those before the first document. ``repaired``: how many tokens were computed again.
        ``missed``: whether the request asked for a repair that was not made."""
        self.prompts_composed += 1
        self.documents_composed += documents
        self.tokens_composed += tokens
        self.tokens_repaired += repaired
        self.repairs_missed += missed

    def counters(self) -> dict[str, int]:
        """The totals that are Prometheus counters, by the names in :data:`COUNTERS`."""
        both = vars(self) | vars(self.eviction)
        return {name: both[name] for name in COUNTERS}

    @property
    def memory_saving_ratio(self) -> float:
        """Slots saved, divided by the positions of the running requests; averaged over the polls."""
        return self.sum_step_ratio / max(self.polls, 1)

    def to_dict(self) -> dict[str, Any]:
        """The totals as JSON, with ratios and means instead of sums; see docs/evaluation.md."""
        affected = self.finished_redirected + self.finished_evicted
        totals = {name: value for name, value in vars(self).items() if not name.startswith("sum_")}
        del totals["eviction"]
        return {
            **totals,
            **vars(self.eviction),
            "refusals": dict(self.refusals),
            "memory_saving_ratio": self.memory_saving_ratio,
            "across_ratio": self.sum_across / max(self.sum_saved, 1),
            "final_saving_ratio": self.sum_final_ratio / max(self.requests_finished, 1),
            "affected_ratio": affected / max(self.finished_positions, 1),
            "mean_running": self.sum_running / max(self.polls, 1),
        }


#: Name of a total -> help text of its Prometheus counter.
COUNTERS: dict[str, str] = {
    total.name: total.metadata["help"]
    for owner in (EvictionStats, SharingStats)
    for total in fields(owner)
    if "help" in total.metadata
}
