# SPDX-License-Identifier: Apache-2.0
"""The controller of a scheduler process. It *polls* (looks at) the running requests every few decode steps, has
their blocks share slots, has policies evict positions, and reports."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from sglang_reasoncache import compat
from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.cache.owner import NOTHING_PROMISED, Promise
from sglang_reasoncache.cache.swap import give_back_pinned, swapped_of
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.config import ReasonCacheConfig
from sglang_reasoncache.custom_params import takes_part
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.eviction.controller import EvictionController
from sglang_reasoncache.plugin.beams import Beams
from sglang_reasoncache.plugin.containment import Containment
from sglang_reasoncache.plugin.report import Report
from sglang_reasoncache.sharing.headroom import LEAST, Shortage
from sglang_reasoncache.sharing.pipeline import BlockPipeline
from sglang_reasoncache.sharing.records import Records
from sglang_reasoncache.sharing.request import RequestRecord, is_running, record_of
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Decode steps between two polls.
INTERVAL = 4
#: While polls compare no blocks, the Prometheus series are updated once in this many polls.
_METRICS_INTERVAL = 8


@dataclass(eq=False)
class Controller:
    """SGLang's scheduler calls the controller through hooks; our allocator and prefix tree ask it as their
    ``SlotOwner``, which says where exceptions are contained (see ``containment.py``).

    In the controller, tensor-parallel ranks exchange numbers only inside :meth:`Containment.together` and
    :meth:`Containment.least`. All ranks call these methods at the same points, because the events that lead to
    a call are the same on all ranks: decode steps, prefills, admissions, retractions and shortages of slots.

    Attributes:
        config: The settings, as ``ResolvedConfig`` has them.
        path_loaded: See ``SlotOwner``.
        slots: Number of slots of the KV pool.
        room: Returns how many of these are free or evictable.
        interval: Decode steps between two polls.
        ahead: How many slots SGLang gives a running request ahead of its tokens: more with speculation.
        learns: See ``ResolvedConfig``.
    """

    config: ReasonCacheConfig
    stats: SharingStats
    ranks: Ranks
    records: Records
    tracker: RequestTracker
    pipeline: BlockPipeline
    eviction: EvictionController
    report: Report
    path_loaded: Callable[[torch.Tensor], None]
    slots: int
    room: Callable[[], int]
    interval: int = INTERVAL
    ahead: float = LEAST
    learns: bool = True

    def __post_init__(self) -> None:
        self.shortage = Shortage(self.slots, self.ahead)
        self.containment = Containment(self.ranks, self._disable)
        self._tokens_a_step = 0
        self._is_active = self.config.is_active
        self._holds = False
        self._beams = Beams()
        with self.containment:
            self.report.publish()

    def _disable(self, reason: str) -> None:
        """Stop sharing and evicting. Shared blocks stay shared, and evicted positions stay evicted."""
        self.report.disabled = reason
        self.pipeline.drop()
        self.tracker.stop()
        self.report.publish()

    # -- asked by allocator, prefix tree and prefill budget: see ``SlotOwner`` ---------

    @property
    def composes(self) -> bool:
        return self.report.documents_off is None

    def once_more(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self.containment.once_more(work, *arguments, **named)

    def contained(self) -> AbstractContextManager[Any]:
        return self.containment

    def contained_alone(self) -> AbstractContextManager[Any]:
        return self.containment if self.ranks.alone else nullcontext()

    def on_all(self, work: Callable[[], Any]) -> Any:
        made = None

        def has_made() -> int:
            nonlocal made
            made = work()
            return made is not None

        if self.report.disabled is not None:
            return None
        return made if self.containment.least(has_made) else None

    @property
    def evicts_prompts(self) -> bool:
        return self.eviction.evicts_prompts

    def hold_polls(self, yes: bool) -> None:
        self._holds = yes

    def promise(self) -> Promise:
        """The slots that the blocks of the ledger can free on every rank, and the learned reserve. All ranks
        call this together. If the plugin is disabled, or off by its settings, admission is SGLang's own. So it
        is while beams run, which SGLang ends if slots are missing, instead of retracting them."""
        least = 0
        if self._is_active and self.report.disabled is None:
            least = self.containment.least(lambda: self.pipeline.ledger.slots)
        if not self.learns or self.report.disabled is not None or self._beams:
            return NOTHING_PROMISED
        kept = 1.0 - self.config.admission_credit
        return Promise(shareable=least, ahead=self.shortage.headroom.ahead, kept=kept)

    def before_prefill(self, reqs: Sequence[Request], rows: torch.Tensor) -> None:
        """Requests are about to be prefilled. ``rows``: int64 ``[requests]``, the index of each one's row."""
        self._beams.begin(reqs)
        selection = self.report.selection
        if selection is not None:
            selection.admit(rows, [not takes_part(req) for req in reqs])

    def request_waits(self, again: bool) -> None:
        self.pipeline.request_waits()
        self.shortage.request_waits(again)

    def admits_again(self) -> bool:
        return self.shortage.admits_again()

    def composed(self, documents: int, tokens: int, repaired: int, missed: bool) -> None:
        self.stats.composed(documents, tokens, repaired, missed)

    def restored(self, tokens: int) -> None:
        self.stats.tokens_swapped_back += tokens

    def continued(self, tokens: int) -> None:
        self.stats.prompts_continued += 1
        self.stats.tokens_continued += tokens

    def keeps_prompt(self, req: Request) -> bool:
        """Whether a request keeps its prompt out of the prefix tree while it runs. Only then can a policy
        evict positions of the prompt: slots of a prompt that is in the tree belong to the tree."""
        return self.eviction.evicts_prompts and takes_part(req)

    def after_chunk(self, req: Request, written: int) -> None:
        """Called when a chunk of a prompt was computed. Lets policies evict positions if :meth:`keeps_prompt`
        is true. ``written``: number of positions of ``req`` whose KV is written."""
        if self.report.disabled is None:
            self.containment.together(self._poll_prompts, (req,), (written,), True)

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """While SGLang retracts all requests for a pause: their KV is not kept."""
        swap = self.report.swap
        if swap is not None:
            swap.give_back()
            swap.rests = True
        if self.report.handover is not None:
            give_back_pinned()
        try:
            yield
        finally:
            if swap is not None:
                swap.rests = False

    def weights_changed(self) -> None:
        """Load no KV from the host that older weights computed, and copy none there later."""
        if self.report.swap is not None:
            self.report.swap.weights_changed()

    def released(self, req: Request, row: HostRow) -> None:
        """Account for a finished, aborted or retracted request. ``row``: our copy of its freed block table."""
        with self.containment:
            if not req.finished():
                handover = self.report.handover
                by_handover = handover is not None and handover.counts(req)
                self.stats.requests_swapped += by_handover or swapped_of(req) is not None
                self.records.retracted(req, row)
            else:
                record = record_of(req)
                try:
                    self.report.to_response(req, record)
                    self._count_ended(req, record, row)
                finally:
                    self.records.ended(req, row)
            if (row.saved or row.evicted or row.in_other_rows) and not self.report.slots_saved:
                self.report.publish()

    def dropped(self, handle: Any) -> None:
        with self.containment:
            self.records.dropped(handle)

    def _count_ended(self, req: Request, record: RequestRecord | None, row: HostRow) -> None:
        """Report a finished request unless it was aborted."""
        if isinstance(req.finished_reason, compat.FINISH_ABORT):
            return
        if record is None:
            if self.records.count(req):
                positions = len(req.origin_input_ids) + len(req.output_ids)
                self.stats.request_finished(0, positions)
        else:
            self.report.request_finished(req, record, row.saved + row.borrowed, row.evicted)

    def flushed(self) -> None:
        """Start anew: SGLang flushes its cache, while no request runs. Distances measured so far are dropped: a
        request that SGLang retracted for a pause may go on with new weights. How much to reserve for a request
        is not: trainers flush at each step."""
        with self.containment:
            self.pipeline.reset()
            self.stats.reset()
            self.tracker.reset()
            self.report.clear()

    def describe(self, details: bool = False, blocks: bool = True) -> dict[str, Any]:
        """JSON for ``GET /reasoncache``, from :meth:`Report.describe`. If that method fails, the JSON has only
        the field ``disabled``."""
        with self.containment:
            return self.report.describe(self.shortage.headroom.ahead, details, blocks)
        return {"disabled": self.report.disabled}

    def log_part(self) -> str:
        """Our part of SGLang's decode log line."""
        return self.report.log_part()

    def response(self, rid: str) -> dict[str, Any] | None:
        """See :meth:`Report.response`."""
        return self.report.response(rid)

    def after_decode(self, reqs: Sequence[Request], tokens: Callable[[], int] | None = None) -> int:
        """Called after a decode step, which gave ``tokens()`` tokens (None: one a request). Every
        ``interval``-th call polls (:meth:`_poll`). Returns how many slots more than before the poll are saved
        or can be freed (:attr:`_to_have`)."""
        if self._holds:
            return 0
        self._tokens_a_step = len(reqs)
        with self.containment:
            # All ranks must count this step, even if one of them fails here.
            if tokens is not None:
                self._tokens_a_step = tokens()
        self.stats.decode_steps += self._is_active
        self.shortage.decoded(self._tokens_a_step)
        if self.steps % self.interval:
            return 0
        before = self._to_have
        compared = self.stats.blocks_compared
        start = time.perf_counter()
        if self._is_active and self.report.disabled is None:
            self.containment.together(self._poll, reqs)
        with self.containment:
            elapsed = time.perf_counter() - start
            self.stats.scheduler_seconds += elapsed
            if self.stats.blocks_compared > compared:
                self.report.publish(elapsed)
            elif self.steps % (_METRICS_INTERVAL * self.interval) == 0:
                self.report.publish()
        return self._to_have - before

    @property
    def steps(self) -> int:
        """Number of decode steps so far, the same on all ranks."""
        return self.shortage.steps

    @property
    def _to_have(self) -> int:
        """Slots saved now, plus slots that the ledger (accepted blocks that do not share yet) can free."""
        return self.report.slots_saved + self.pipeline.ledger.slots

    def reclaim(self, slots: int, evicts: bool) -> None:
        """Try to free ``slots`` slots, which SGLang lacks even if its prefix cache evicts all that it can.
        First, blocks share. If slots are still missing and ``evicts``, policies with ``when=short`` evict
        positions. All ranks call this together, because all ranks have the same number of free slots."""
        if self._is_active and self.report.disabled is None:
            self.containment.together(self._reclaim, slots, evicts)

    def _reclaim(self, wanted: int, evicts: bool) -> None:
        start = time.perf_counter()
        self.stats.shortages += 1
        missing = wanted - self.pipeline.reclaim(wanted)
        # If sharing freed too few slots, policies with ``when=short`` evict, from the longest requests first.
        running = list(self.records.running()) if evicts and self.eviction.waits else []
        for req, record in sorted(running, key=lambda each: -each[0].kv.kv_allocated_len):
            if missing <= 0:
                break
            before = self.stats.eviction.slots_freed_by_eviction
            self._evict(req, record, self.eviction.give, missing)
            missing -= self.stats.eviction.slots_freed_by_eviction - before
        self.stats.scheduler_seconds += time.perf_counter() - start

    def _make_room(self) -> None:
        """While slots are short, let blocks share ahead of need, so that the next decode steps find slots. Then
        no step is delayed, and none is short while blocks are left."""
        if not self.shortage.is_now:
            return
        missing = 2 * self.interval * self._tokens_a_step - self.room()
        if missing > 0:
            self.pipeline.reclaim(missing)

    def _poll(self, reqs: Sequence[Request]) -> None:
        """Measure the blocks that the filter process found; with ``when=always``, let accepted blocks share.
        Hand new tokens to the filter, whose results a later poll takes. Then have policies evict positions."""
        self.pipeline.advance()
        running = [(req, self.records.born(req)) for req in reqs if is_running(req)]
        logical = 0
        for req, record in running:
            if record.row is None:
                self.records.prefilled(req, record, self.pipeline.redirector.row_of(req))
            assert record.row is not None
            if record.pending:
                self.pipeline.requeue(req, record)
            logical += req.kv.kv_allocated_len
        self.tracker.feed(req for req, _ in running)
        self.stats.poll(len(running), self.report.slots_saved, logical, self.pipeline.across)
        self._make_room()
        if self.eviction.is_active:
            # After a retraction a row has its full size until its blocks share again. Policies are not asked
            # before that, because they would evict too much.
            returning = self.pipeline.returning()
            for req, record in running:
                ask = id(req) not in returning
                self._evict(req, record, self.eviction.poll, None, ask)

    def after_prefill(self, reqs: Sequence[Request], written: Iterable[int]) -> int:
        """Called after prompts, or chunks of prompts, were computed. Lets policies evict positions. Returns how
        many slots were freed. ``written``: for each of ``reqs``, number of positions whose KV is written."""
        before = self.report.slots_saved
        if self.eviction.evicts_prompts and self.report.disabled is None:
            self.containment.together(self._poll_prompts, reqs, written)
        return self.report.slots_saved - before

    def _poll_prompts(
        self, reqs: Sequence[Request], written: Iterable[int], chunk: bool = False
    ) -> None:
        start = time.perf_counter()
        for req, positions in zip(reqs, written, strict=True):
            if is_running(req) and self.keeps_prompt(req):
                # Between two chunks :meth:`after_chunk` decides: the next one overwrites newest queries.
                begin = chunk or positions >= len(req.full_untruncated_fill_ids)
                record = self.records.born(req)
                self._evict(req, record, self.eviction.poll, positions, True, begin)
        self.stats.scheduler_seconds += time.perf_counter() - start

    def _evict(
        self, req: Request, record: RequestRecord, work: Callable[..., Any], *arguments: object
    ) -> None:
        """If ``req`` takes part, call ``work``, a method of ``eviction``. Then remove blocks from the ledger
        that contain or would read an evicted position."""
        if record.takes_part:
            evicted = self.stats.eviction.positions_evicted
            work(req, record.eviction, *arguments)
            if self.stats.eviction.positions_evicted > evicted:
                self.pipeline.evicted(req)
