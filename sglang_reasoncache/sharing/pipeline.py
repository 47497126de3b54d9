# SPDX-License-Identifier: Apache-2.0
"""Takes block pairs that the filter process proposes, checks the rules, and measures and judges the pairs' KV
distances. Accepted blocks enter the ledger. They share at once or when SGLang is short of slots: then their
positions in the request's row (block table) are redirected to the source's slots. Nothing here waits for the
filter process or the device."""

import collections
import math
import weakref
from collections.abc import Callable

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.device.ranks import Ranks
from sglang_reasoncache.filter.messages import StepResult
from sglang_reasoncache.sharing.blocks import BlockProposal, Candidate, Pages, Run
from sglang_reasoncache.sharing.meter import BlockMeter, Measurement
from sglang_reasoncache.sharing.nearest import nearest_pairs
from sglang_reasoncache.sharing.records import Records
from sglang_reasoncache.sharing.redirect import Redirector
from sglang_reasoncache.sharing.request import RequestRecord, has_row, known_record
from sglang_reasoncache.sharing.rules import Judgement, Refusal, Rules, Stage
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Largest number of blocks in a batch, and of filter replies taken at once. Bounds the time of a poll.
_MAX_BATCH = 256
#: Pending blocks are queued only up to here. When half of the pool comes into use, all running requests may
#: have some, tens of thousands together.
_MOST_QUEUED = 4 * _MAX_BATCH
#: How many pairs of the filter are entered, and how many queued blocks are refused, in the time that measuring
#: one block takes.
_ENTERED = 2
_REFUSED = 8
#: Unless ``at_once``, blocks are measured while more than this fraction of the KV pool is in use. While less is
#: in use, SGLang will not run out of slots soon.
_MEASURED_FROM = 0.5
#: Blocks are also measured for this many polls after a request had to wait for slots.
_POLLS_AFTER_WAIT = 256
#: In a shortage at least this many slots are freed, so that the next decode step is not short of slots again.
_LEAST_RECLAIMED = 64

#: A block and its source; or alternatives, of which those with the least KV distance share (``nearest.py``).
Group = list[BlockProposal]
#: Groups that are measured together.
Batch = list[Group]


class BlockPipeline:
    """Takes block pairs from the filter, enters accepted blocks in the ledger, and redirects them. Each
    scheduler has one pipeline. A batch is judged once all ranks have its measurement in host memory.

    Args:
        tracker: Brings the block pairs.
        records: The records of the requests that the blocks belong to.
        rules: The rules that must allow a block.
        meter: Measures KV distances.
        threshold: Judges KV distances.
        redirector: Redirects the blocks of the ledger.
        stats: Counts what happens to blocks.
        ranks: The ranks that run the same requests.
        block: Tokens per block that the filter finds.
        page: Page size, in tokens. Above 1 a block that shares is a page.
        at_once: Whether blocks share as soon as they are accepted. Otherwise :meth:`reclaim` lets them share.
        use: Returns the fraction of the KV pool that is in use, 0 to 1. It must be the same on all ranks.
    """

    def __init__(
        self,
        *,
        tracker: RequestTracker,
        records: Records,
        rules: Rules,
        meter: BlockMeter,
        threshold: AdaptiveThreshold,
        redirector: Redirector,
        stats: SharingStats,
        ranks: Ranks,
        block: int,
        page: int,
        at_once: bool,
        use: Callable[[], float],
    ) -> None:
        self.threshold = threshold
        self.meter = meter
        self.block = block
        self._page = page
        self.at_once = at_once
        self.redirector = redirector
        self.ledger = records.ledger
        self._tracker = tracker
        self._records = records
        self._rules = rules
        self._stats = stats
        self._ranks = ranks
        self._use = use
        self._polls_to_measure = 0
        self._measures = False
        self._waiting: collections.deque[Group] = collections.deque()
        self._in_flight: tuple[Batch, Measurement] | None = None

    @property
    def saved(self) -> int:
        """The number of slots that sharing saves now."""
        return self.redirector.saved

    @property
    def across(self) -> int:
        """The part of :attr:`saved` that is due to sharing between requests."""
        return self.saved - self.redirector.within

    @property
    def _unjudged(self) -> Group:
        """Blocks that wait to be measured, or are being measured."""
        return _flat([*self._waiting, *(self._in_flight[0] if self._in_flight else ())])

    def advance(self) -> None:
        """Measure and judge batches until one is not ready yet, none is left, or ``_MAX_BATCH`` pairs are done.

        Only a single batch is measured at a time. Meanwhile the results of finished steps wait. While too many
        wait, the filter does not compare new steps.
        """
        self._polls_to_measure = max(self._polls_to_measure - 1, 0)
        self._measures = self.at_once or self._polls_to_measure > 0 or self._use() > _MEASURED_FROM
        done = 0
        while done < _MAX_BATCH:
            if self._in_flight is not None:
                batch, measured = self._in_flight
                if not measured.is_immediate and not self._ranks.least(measured.ready()):
                    break
                self._in_flight = None
                self._judge(batch, measured)
                done += sum(map(len, batch))
            elif not self._waiting:
                entered = self._collect()
                if not entered:
                    break
                done += math.ceil(entered / _ENTERED)
            else:
                queued = len(self._waiting)
                if not self._launch():
                    # The rules allowed none of the blocks. Checking them took time, too.
                    done += math.ceil((queued - len(self._waiting)) / _REFUSED)
        if self.at_once:
            self._share(math.inf)

    def request_waits(self) -> None:
        """Called when SGLang has no slots for a request. The next polls then measure blocks."""
        self._polls_to_measure = _POLLS_AFTER_WAIT

    def reclaim(self, wanted: int) -> int:
        """Let blocks of the ledger share, the smallest distance first, until ``wanted`` slots became free or
        the ledger is empty. Returns how many slots became free. All ranks call this together."""
        before = self.saved
        while self.ledger.slots and self.saved - before < wanted:
            self._share(max(wanted - (self.saved - before), _LEAST_RECLAIMED))
        return self.saved - before

    def requeue(self, req: Request, record: RequestRecord) -> None:
        """Queue the pending blocks of ``req`` to be measured. ``req`` must have its row. Does nothing while no
        blocks are measured (see ``_MEASURED_FROM``), or while enough blocks are queued, unless some shared
        before a retraction. A block stays pending while its source has no row."""
        if not self._measures:
            return
        if len(self._waiting) >= _MOST_QUEUED and not any(
            candidate.shared_at and self._has_source(req, candidate) for candidate in record.pending
        ):
            return
        waiting = record.pending
        record.pending = []
        for candidate in waiting:
            source = req if candidate.source is None else candidate.source()
            # The block cannot share, because the source's request has ended. The block stays in
            # ``record.candidates``, because a request that SGLang dropped may still exist on some ranks.
            if source is None or source.finished():
                continue
            if has_row(source):
                self._waiting.append([self._block(req, candidate, source)])
            else:
                record.pending.append(candidate)

    def _has_source(self, req: Request, candidate: Candidate) -> bool:
        """Whether the source of ``candidate`` has its row. Unlike whether its request still exists, which only
        a weak reference knows, this is so on all ranks or on none."""
        source = req if candidate.source is None else candidate.source()
        return source is not None and has_row(source)

    def returning(self) -> set[int]:
        """``id`` of every request with a block that shared before a retraction and is not judged again yet."""
        return {id(block.req) for block in self._unjudged if block.candidate.shared_at}

    def evicted(self, req: Request) -> None:
        """Remove the ledger's blocks that contain or would read an evicted position of ``req``."""
        for block in self.ledger.of(req):
            if not self._allows(block):
                self.ledger.remove(block)

    def drop(self) -> None:
        """Forget the blocks that are queued, being measured or in the ledger, and earlier calls of
        :meth:`request_waits`."""
        self._waiting.clear()
        self._polls_to_measure = 0
        self._in_flight = None
        self.ledger.clear()

    def reset(self) -> None:
        """Call :meth:`drop` and forget all distances, because the weights may have changed. Retracted
        requests may be computed again with the new weights."""
        self.drop()
        self.threshold.reset()

    def _collect(self) -> int:
        """Take blocks from the filter's replies. Returns how many pairs and results there were."""
        results = self._tracker.take(_MAX_BATCH, _MAX_BATCH)
        for req, result in results:
            if req is None:
                self._stats.refusals[Refusal.LATE.value] += result.num_pairs
                continue
            record = known_record(req)
            record.steps += 1
            record.proposed += result.num_pairs
            # The rules are checked again before measuring. The check here makes the batches equal on all ranks:
            # a request that SGLang dropped may still exist on some ranks, which refuse its blocks here.
            for block in self._blocks(req, result):
                if not self._enter(block):
                    continue
                if self._measures:
                    self._waiting.append([block])
                else:
                    record.pending.append(block.candidate)
            for pairs in result.alternatives:
                # They are measured whether or not SGLang has enough slots, because only the chosen are kept.
                group = [
                    self._block(req, Candidate((Run(*pair, self.block),)), req) for pair in pairs
                ]
                allowed = [block for block in group if self._allows(block, Stage.PROPOSED)]
                if allowed:
                    self._waiting.append(allowed)
        return len(results) + sum(result.num_pairs for _, result in results)

    def _enter(self, block: BlockProposal) -> bool:
        """Make the block a candidate of its request if the rules allow that. Returns whether it is one."""
        if _is_candidate(block):
            return True
        if not self._allows(block, Stage.PROPOSED):
            return False
        known_record(block.req).candidates[block.dst_start] = block.candidate
        return True

    def _blocks(self, req: Request, result: StepResult) -> Group:
        blocks = [
            self._block(req, Candidate(runs), req)
            for pair in result.pairs
            for runs in self._whole(req, Run(*pair, self.block))
        ]
        for dst, src, member in result.across:
            source = self._records.source(req, member)
            if source is None:
                self._count(req, Refusal.LATE)
                continue
            for runs in self._whole(req, Run(dst, src, self.block), member):
                candidate = Candidate(runs, weakref.ref(source), source.rid)
                blocks.append(self._block(req, candidate, source))
        return blocks

    def _whole(self, req: Request, block: Run, member: int | None = None) -> list[tuple[Run, ...]]:
        """What may share now that the filter found a block: at page size 1 the block, else the pages that it
        completes. ``member``: see :meth:`Records.source`; None if the source is in the same response."""
        if self._page == 1:
            return [(block,)]
        record = known_record(req)
        if record.pages is None:
            record.pages = Pages(self._page)
        return record.pages.add(block, member)

    def _block(self, req: Request, candidate: Candidate, lender: Request) -> BlockProposal:
        """A proposal that refers to the current rows of both requests."""
        return BlockProposal(
            req=req,
            candidate=candidate,
            row=known_record(req).row,
            lender=lender,
            lender_row=known_record(lender).row,
        )

    def _launch(self) -> bool:
        """Start to measure the next queued groups, whose blocks have one length. Returns False if the rules
        allow none of the blocks."""
        batch: Batch = []
        size = 0
        length = self._waiting[0][0].length if self._waiting else 0
        while self._waiting and (size == 0 or size + len(self._waiting[0]) <= _MAX_BATCH):
            if self._waiting[0][0].length != length:
                break
            group = self._waiting.popleft()
            size += len(group)
            allowed = [block for block in group if self._allows(block)]
            if allowed:
                batch.append(allowed)
        if batch:
            self._in_flight = batch, self.meter.measure(_flat(batch))
        return bool(batch)

    def _judge(self, batch: Batch, measured: Measurement) -> None:
        """Judge a measured batch, and enter the accepted blocks in the ledger."""
        # Ranks add up the sums of the whole batch, so blocks that the rules now refuse are left out only below.
        distances = self.meter.distances(measured)
        blocks = _flat(batch)
        chosen = self._choose(batch, distances)
        epoch = self.threshold.epoch
        fresh = [i for i in chosen if blocks[i].candidate.accepted != epoch]
        self._stats.blocks_compared += len(fresh)
        accepted = self.threshold.decide([distances[i] for i in fresh])
        too_far = {i for i, yes in zip(fresh, accepted, strict=True) if not yes}
        is_warm = self.threshold.is_warm
        dst_slots, src_slots = measured.slots()
        for i in chosen:
            block = blocks[i]
            judgement = Judgement(accepted=i not in too_far, is_warm=is_warm)
            refusal = self._rules.refusal(block, Stage.MEASURED, judgement)
            if refusal is None:
                row, lender_row = block.rows
                row.locate(block.dst_start, dst_slots[i])
                for run in block.runs:
                    at = run.dst_start - block.dst_start
                    lender_row.locate(run.src_start, src_slots[i][at : at + run.length])
                refusal = self._rules.refusal(block, Stage.LOCATED) or self._rules.refusal(
                    block, Stage.ACCEPTED
                )
            if refusal is None:
                self._accept(block, distances[i])
            else:
                self._refuse(block, refusal)

    def _choose(self, batch: Batch, distances: list[float]) -> list[int]:
        """Indexes, in the flattened batch, of the candidates to judge: blocks that the rules still allow. Of
        alternatives those with the least KV distance become candidates; the others are forgotten. At page sizes
        above 1 the pages that these complete are queued instead, to be measured as a whole."""
        chosen = []
        begin = 0
        for group in batch:
            allowed = [i for i, block in enumerate(group) if self._allows(block)]
            pairs = [(group[i].dst_start, group[i].src_start) for i in allowed]
            nearest = nearest_pairs(pairs, [distances[begin + i] for i in allowed])
            for i in nearest:
                block = group[allowed[i]]
                if self._page == 1 or _is_candidate(block):
                    if self._enter(block):
                        chosen.append(begin + allowed[i])
                    continue
                for runs in self._whole(block.req, block.runs[0]):
                    page = self._block(block.req, Candidate(runs), block.req)
                    if self._enter(page):
                        self._waiting.append([page])
            begin += len(group)
        return chosen

    def _accept(self, block: BlockProposal, distance: float) -> None:
        """Enter a block that all rules allow in the ledger."""
        dst, src = self._rules.keys(block)
        known_record(block.req).merges.join(dst, src)
        block.candidate.accepted = self.threshold.epoch
        self.ledger.add(block, distance)

    def _share(self, wanted: float) -> None:
        """Redirect one batch of the ledger's blocks, the smallest distance first. Stops early once ``wanted``
        slots became free. If this raises, rows and reference counts are as before."""
        begun = self.redirector.begin()
        try:
            while begun.freed < wanted and begun.work < _MAX_BATCH:
                block = self.ledger.take()
                if block is None:
                    break
                if self._allows(block, Stage.LOCATED):
                    begun.add(block)
                else:
                    self._stats.blocks_missed += 1
            begun.commit()
        except BaseException:
            begun.undo()
            raise
        begun.count()

    def _allows(self, block: BlockProposal, stage: Stage = Stage.ALWAYS) -> bool:
        """Whether the rules of ``ALWAYS`` and of ``stage`` allow the block. A refusal is counted."""
        refusal = self._rules.refusal(block, Stage.ALWAYS)
        if refusal is None and stage is not Stage.ALWAYS:
            refusal = self._rules.refusal(block, stage)
        if refusal is not None:
            self._refuse(block, refusal)
        return refusal is None

    def _refuse(self, block: BlockProposal, refusal: Refusal) -> None:
        record = known_record(block.req)
        candidate = block.candidate
        waits = _is_candidate(block) and refusal in (Refusal.LATE, Refusal.IN_WINDOW)
        # A block that waits is asked about at each poll.
        if not (waits and candidate.waits == refusal.value):
            self._count(block.req, refusal)
        if waits:
            candidate.waits = refusal.value
            if record.row is not None and record.row is block.row:
                # It waits until the request of the source has a row, or until the sliding window has passed.
                record.pending.append(candidate)
        elif _is_candidate(block):
            del record.candidates[block.dst_start]

    def _count(self, req: Request, refusal: Refusal) -> None:
        self._stats.refusals[refusal.value] += 1
        known_record(req).refusals[refusal.value] += 1


def _is_candidate(block: BlockProposal) -> bool:
    """Whether the block is a candidate of its request. Alternatives are none yet."""
    return known_record(block.req).candidates.get(block.dst_start) is block.candidate


def _flat(batch: Batch) -> Group:
    return [block for group in batch for block in group]
