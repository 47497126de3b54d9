# SPDX-License-Identifier: Apache-2.0
"""Reports to operators: ``GET /reasoncache``, a part of SGLang's decode log line, Prometheus series."""

import hashlib
import os
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_reasoncache.cache.continuations import Continuations
from sglang_reasoncache.cache.handover import Handover
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.swap import HostSwap
from sglang_reasoncache.compat.carriers import CONTINUED
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.custom_params import OPT_OUT_KEY, asked_by
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.selection.pages import PageSelection
from sglang_reasoncache.sharing.blocks import MOST_OF_ID
from sglang_reasoncache.sharing.group import PromptGroup
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.records import Records
from sglang_reasoncache.sharing.request import RequestRecord, record_of
from sglang_reasoncache.sharing.rules import Refusal
from sglang_reasoncache.sharing.stats import COUNTERS, SharingStats

#: ``GET /reasoncache/details`` lists at most this many finished requests.
_RECENT_REQUESTS = 32
#: A request's entry lists at most this many blocks that share within the request, and as many across requests.
_RECENT_BLOCKS = 1024
#: At most this many tokens of a response are kept in order to show its text.
_KEPT_TOKENS = 16_384
#: Fields of a finished request that ``GET /reasoncache/details?blocks=false`` leaves out.
_OF_BLOCKS = ("blocks", "blocks_across", "sources", "evictions", "recomputed")
#: ``GET /reasoncache`` describes at most this many groups of requests with equal prompts.
_GROUPS = 16
_PREFIX = "sglang:reasoncache_"

#: Name of a Prometheus gauge -> what it says.
GAUGES = {
    "slots_saved_now": "Slots that sharing and evicting save the running requests.",
    "slots_shareable_now": "Slots that the running requests can free when SGLang is short.",
    "slots_saved_across_now": "Slots that running requests save by sharing with each other.",
    "positions_evicted_now": "Evicted positions of the running requests.",
    "host_swap_bytes_now": "Host memory that holds the KV of retracted requests.",
    "memory_saving_ratio": "Slots saved over logical slots, averaged over decode steps.",
    "filter_given_up": "1 when the process that compares steps failed too often or was ended: no "
    "further blocks are shared.",
    "disabled": "1 once something failed: no further blocks are shared, no positions evicted.",
    "uncorrected": "1 if keys cannot be corrected, KV cannot be shared or steps cannot be read, so that "
    "nothing is shared from the start on.",
}
_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class SharingMetrics:
    """Our Prometheus series. ``labels``: name -> value of each label, as in SGLang's scheduler series."""

    def __init__(self, labels: dict[str, Any]) -> None:
        # Imported late, because the import reads ``PROMETHEUS_MULTIPROC_DIR``, which SGLang has set by now.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = {key: str(value) for key, value in labels.items()}
        names = list(self._labels)
        self._counters = {
            name: Counter(_PREFIX + name.removesuffix("_total"), text, names)
            for name, text in COUNTERS.items()
        }
        text = "Blocks not shared, by reason."
        self._counters["refusals"] = Counter(_PREFIX + "refusals", text, [*names, "reason"])
        for reason in Refusal:
            # Create the series at 0 now: Prometheus's ``rate`` ignores the value at which a series begins.
            self._counters["refusals"].labels(**self._labels, reason=reason.value)
        self._gauges = {
            name: Gauge(_PREFIX + name, text, names, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }
        text = "Scheduler time of a poll that judged blocks."
        latency = Histogram(_PREFIX + "poll_seconds", text, names, buckets=_BUCKETS)
        self._latency = latency.labels(**self._labels)
        self._seen: dict[tuple[str, ...], int] = {}

    def update(
        self, stats: SharingStats, gauges: Mapping[str, float], latency: float | None
    ) -> None:
        """Set all series. ``latency``: see :meth:`Report.publish`."""
        for name, total in stats.counters().items():
            self._count(name, total)
        for reason, total in stats.refusals.items():
            self._count("refusals", total, reason=reason)
        for name, value in gauges.items():
            self._gauges[name].labels(**self._labels).set(value)
        if latency is not None:
            self._latency.observe(latency)

    def _count(self, name: str, total: int, **reason: str) -> None:
        key = (name, *reason.values())
        seen = self._seen.get(key, 0)
        self._seen[key] = total
        # A cache flush sets our totals to 0, but a Prometheus counter must never fall.
        added = total - seen if total >= seen else total
        self._counters[name].labels(**self._labels, **reason).inc(added)


@dataclass(eq=False)
class Report:
    """Reports of a scheduler.

    Attributes:
        continuations: Returns the part of the prefix cache whose nodes alias.
        swap: Keeps the KV of retracted requests on the host. None if it is computed again.
        handover: Counts such copies on the decode server of a PD pair. None on other servers.
        selection: Selects what decode steps read. None if they read everything.
        metrics: Prometheus series. None without ``--enable-metrics``.
        uncorrected: Why nothing is shared although the operator asked for it. Else None.
        documents_off: Why prompts are not composed of cached documents. None if prompts are composed.
        disabled: The failure that ended sharing and evicting (``containment.py``); None if nothing failed.
        recent: The last finished requests, oldest first.
        kept: The newest ``keep_responses`` finished requests, each with the first token ids of its output.
        dp_rank: Index of the scheduler's data-parallel replica, or of the scheduler's DP-attention group.
        hides_ids: Whether a response's record names other responses, which other clients may have asked for, by
            digests of their ids.
    """

    config: ReasonCacheConfig
    stats: SharingStats
    records: Records
    pipeline: BlockPipeline
    eviction: EvictionController
    continuations: Callable[[], Continuations]
    swap: HostSwap | None = None
    handover: Handover | None = None
    selection: PageSelection | None = None
    metrics: SharingMetrics | None = None
    uncorrected: str | None = None
    documents_off: str | None = None
    disabled: str | None = None
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_REQUESTS))
    dp_rank: int = 0
    hides_ids: bool = False
    kept: deque[tuple[dict[str, Any], "array[int]"]] = field(init=False)

    def __post_init__(self) -> None:
        self._key = os.urandom(32)
        self.kept = deque(maxlen=self.config.keep_responses)

    @property
    def slots_saved(self) -> int:
        """How many slots the running requests save now, by sharing and by evicting."""
        return self.pipeline.saved + self.eviction.positions_now

    @property
    def _now(self) -> dict[str, int]:
        """Current counts, named and described in ``GAUGES``."""
        return {
            "slots_saved_now": self.slots_saved,
            "slots_shareable_now": self.pipeline.ledger.slots,
            "slots_saved_across_now": self.pipeline.across,
            "positions_evicted_now": self.eviction.positions_now,
            "host_swap_bytes_now": sum(
                holder.num_bytes for holder in (self.swap, self.handover) if holder is not None
            ),
        }

    def request_finished(
        self, req: Request, record: RequestRecord, shared: int, evicted: int
    ) -> None:
        """Remember a finished request, and count it if it took part. ``shared`` of its positions read another
        position's slot, and ``evicted`` of its positions were evicted."""
        prompt = len(req.origin_input_ids)
        output = len(req.output_ids)
        self.recent.append(
            {
                "rid": req.rid[:MOST_OF_ID],
                "prompt_tokens": prompt,
                "output_tokens": output,
                "shared_positions": shared,
                "evicted_positions": evicted,
                "retractions": req.retraction_count,
                **_what_became_of_blocks(record),
                **_what_was_read(record, _RECENT_BLOCKS),
            }
        )
        if not record.takes_part:
            return
        self.stats.request_finished(shared, prompt + output, evicted)
        if self.config.keep_responses:
            self.kept.append((self.recent[-1], array("i", req.output_ids[:_KEPT_TOKENS])))

    def to_response(self, req: Request, record: RequestRecord | None) -> None:
        """If a finished request asked for it (``Asked.record``), have its response say which of its positions
        read or hold others' KV, in ``meta_info`` under :data:`OPT_OUT_KEY`; see docs/rollouts.md."""
        said = len(req.output_ids_through_stop)
        if said and asked_by(req).record:
            entry = self._to_send(req, record)
            # SGLang sends one entry for each output token, the last with the end of the response.
            mine = {OPT_OUT_KEY: [*[None] * (said - 1), entry]}
            req.customized_info = {**(req.customized_info or {}), **mine}

    def record_to_send(self, req: Request) -> dict[str, Any] | None:
        """What :meth:`to_response` would say of a request that ends while it waits. None if it did not ask, or
        has no output."""
        if not req.output_ids or not asked_by(req).record:
            return None
        return self._to_send(req, record_of(req))

    def _to_send(self, req: Request, record: RequestRecord | None) -> dict[str, Any]:
        entry = {
            "continued": getattr(req, CONTINUED, None),
            **_what_was_read(record or RequestRecord(), None),
        }
        if self.hides_ids:
            entry["sources"] = [self._name(rid) for rid in entry["sources"]]
            entry["id"] = self._name(req.rid[:MOST_OF_ID])
        return entry

    def _name(self, rid: str) -> str:
        """A name for ``rid`` that does not tell it."""
        text = rid.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._key, digest_size=16).hexdigest()

    def response(self, rid: str) -> dict[str, Any] | None:
        """The entry of request ``rid`` in ``kept``, with up to 16,384 ``output_ids``, or None. Of requests with
        equal ids the newest is told."""
        name = rid[:MOST_OF_ID]
        matches = (
            entry | {"output_ids": list(ids)}
            for entry, ids in reversed(self.kept)
            if entry["rid"] == name
        )
        return next(matches, None)

    def clear(self) -> None:
        """Forget finished requests."""
        self.recent.clear()
        self.kept.clear()

    def publish(self, latency: float | None = None) -> None:
        """Update the Prometheus series. ``latency``: seconds that the poll just took, if it compared blocks."""
        if self.metrics is None:
            return
        self._count_selected()
        gauges = {
            **self._now,
            "memory_saving_ratio": self.stats.memory_saving_ratio,
            "filter_given_up": self.stats.filter_given_up,
            "disabled": self.disabled is not None,
            "uncorrected": self.uncorrected is not None,
        }
        self.metrics.update(self.stats, gauges, latency)

    def describe(self, ahead: float, details: bool, blocks: bool = True) -> dict[str, Any]:
        """JSON for the endpoint. ``ahead``: tokens of each request's output for which admission reserves slots.
        ``details``: add ``recent``. ``blocks``: include the fields ``_OF_BLOCKS``, up to 328,000 numbers."""
        self._count_selected()
        recent = [*self.recent] if details else []
        if not blocks:
            recent = [{k: v for k, v in entry.items() if k not in _OF_BLOCKS} for entry in recent]
        return {
            "dp_rank": self.dp_rank,
            "disabled": self.disabled,
            "uncorrected": self.uncorrected,
            "documents_off": self.documents_off,
            "config": self.config.to_dict(),
            "block": self.pipeline.block,
            **self._now,
            "aliased_nodes_now": len(self.continuations()),
            "slots_saved_in_cache_now": self.continuations().aliased,
            "groups": self._groups(_GROUPS),
            "evictors": self.eviction.described,
            "reserved_per_request": ahead,
            "threshold": self.pipeline.threshold.describe(),
            "distances": self.pipeline.meter.backend,
            "totals": self.stats.to_dict(),
            **({"recent": recent} if details else {}),
        }

    def _count_selected(self) -> None:
        if self.selection is not None:
            self.stats.selected(*self.selection.newly_counted())

    def _groups(self, most: int) -> list[dict[str, Any]]:
        """JSON of at most ``most`` groups with several running requests. The groups whose requests read the
        most slots of other requests come first."""
        members: dict[PromptGroup, list[tuple[Request, HostRow]]] = {}
        for req, record in self.records.running():
            if record.group is not None and record.row is not None:
                members.setdefault(record.group, []).append((req, record.row))
        described = [
            {
                "prompt_tokens": len(group[0][0].origin_input_ids),
                "requests": len(group),
                "slots_saved_within_now": sum(row.saved for _, row in group),
                "slots_read_across": sum(row.borrowed for _, row in group),
            }
            for group in members.values()
            if len(group) > 1
        ]
        return sorted(described, key=lambda group: -group["slots_read_across"])[:most]

    def log_part(self) -> str:
        """Our part of SGLang's decode log line."""
        shared = self.pipeline.saved
        evicted = self.eviction.positions_now
        shareable = self.pipeline.ledger.slots
        return f"#shared token: {shared}, #shareable token: {shareable}, #evicted token: {evicted}"


def _what_became_of_blocks(record: RequestRecord) -> dict[str, Any]:
    """Why a response shared no more than it did (docs/watching.md)."""
    accepted, unmeasured = record.unshared()
    return {
        "opted_out": not record.takes_part,
        "steps": record.steps,
        "blocks_proposed": record.proposed,
        "blocks_shared": len(record.approximate),
        "blocks_accepted": accepted,
        "blocks_unmeasured": unmeasured,
        "refusals": dict(record.refusals),
    }


def _what_was_read(record: RequestRecord, most: int | None) -> dict[str, Any]:
    """The blocks of a response whose positions read, or hold a copy of, other positions' KV, and its evicted
    runs: what a replay of the response needs. ``most``: limit on each list of blocks."""
    approximate = record.approximate
    within = [b for b in approximate if b.source is None][:most]
    across = [b for b in approximate if b.source is not None][:most]
    # Each source's id is listed once: its blocks refer to it by its index.
    sources = {rid: at for at, rid in enumerate(dict.fromkeys(b.source_rid for b in across))}
    return {
        "blocks": [(b.shared_at, *run) for b in within for run in b.runs][:most],
        "blocks_across": [
            (b.shared_at, *run, sources[b.source_rid]) for b in across for run in b.runs
        ][:most],
        "sources": list(sources),
        "evictions": list(record.eviction.evictions),
        "recomputed": list(record.recomputed),
    }
