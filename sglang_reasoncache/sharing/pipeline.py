# SPDX-License-Identifier: Apache-2.0
"""The way of a block pair: proposed, allowed, measured in a batch in flight, judged, entered in the
ledger, and redirected at once or when SGLang is short of slots.

Nothing here waits for the step engine or for a device, and no request does.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Callable
from typing import NamedTuple

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.sharing.acceptor import Acceptor, Redirection
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal, refusal_of
from sglang_reasoncache.sharing.ledger import Entry, Ledger
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement
from sglang_reasoncache.sharing.merges import Key
from sglang_reasoncache.sharing.state import Candidate, RequestState, has_row, state_of
from sglang_reasoncache.sharing.threshold import AdaptiveThreshold
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Finished steps taken from the engine at once, unless their blocks fill a batch before.
_TAKE_LIMIT = 256
#: Blocks measured at once, and as many applied in one poll: many steps may end together.
_MAX_BATCH = 256
#: Positions that move together: more save little and cost the scheduler's thread time.
MAX_READERS = 16
#: Share of the pool in use from which blocks are measured: below, SGLang will not be short soon.
_MEASURED_FROM = 0.5
#: Polls for which they are measured after a request had to wait.
_AFTER_REFUSAL = 256
#: Slots that a shortage takes at least: it comes again with every decode step.
_LEAST_RECLAIMED = 64

Batch = list[BlockProposal]


class Planned(NamedTuple):
    """A block that will be applied, how many slots that frees, and how many of them another request
    keeps instead."""

    block: BlockProposal
    state: RequestState
    redirections: list[Redirection]
    saved: int
    across: int


class BlockPipeline:
    """One per scheduler. A batch is judged when its distances have arrived on all ranks.

    Args:
        at_once: Blocks share when they are accepted; otherwise when :meth:`reclaim` is called.
        use: The share of the pool in use, the same on all ranks.

    Attributes:
        block: Tokens per block.
        tracker: Of the requests whose blocks these are.
        ledger: Accepted blocks that do not share yet.
        within: Slots that the running requests do without by sharing with themselves.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        meter: BlockMeter,
        acceptor: Acceptor,
        threshold: AdaptiveThreshold,
        block: int,
        min_age: int = 0,
        at_once: bool = True,
        use: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.threshold, self.meter, self.block = threshold, meter, block
        self.ledger, self.within, self.at_once = Ledger(), 0, at_once
        self._use, self._refused, self._measures = use, 0, False
        self.tracker, self._acceptor = tracker, acceptor
        self._stats, self._ranks, self._min_age = tracker.stats, tracker.ranks, min_age
        self._waiting: collections.deque[Batch] = collections.deque()
        self._in_flight: tuple[Batch, Measurement] | None = None

    @property
    def saved(self) -> int:
        """Slots that the running requests do without by sharing."""
        return self._acceptor.saved

    @property
    def across(self) -> int:
        """Those of them that several requests share."""
        return self.saved - self.within

    def advance(self) -> None:
        """Bring block pairs as far as they come without waiting, or ``_MAX_BATCH`` of them.

        One batch at a time is measured. Meanwhile steps pile up in the engine, which sheds.
        """
        self._refused = max(self._refused - 1, 0)
        self._measures = self.at_once or self._refused > 0 or self._use() > _MEASURED_FROM
        done = 0
        while done < _MAX_BATCH:
            if self._in_flight is not None:
                batch, measured = self._in_flight
                if not measured.is_immediate and not self._ranks.least(measured.ready()):
                    break
                self._in_flight = None
                self._judge(batch, measured)
                done += len(batch)
            elif not self._waiting and not self._collect():
                break
            elif not self._launch():
                # What was collected had no blocks, or came too late; it took some time too.
                done += 1
        if self.at_once:
            self._share(math.inf)

    def refused(self) -> None:
        """A request waits for slots, so blocks are measured."""
        self._refused = _AFTER_REFUSAL

    def reclaim(self, wanted: int) -> int:
        """Let blocks share, those with the smallest distance first, until ``wanted`` slots came back
        or the ledger is empty; how many did. All ranks call this together."""
        before = self.saved
        while self.ledger.slots and self.saved - before < wanted:
            self._share(max(wanted - (self.saved - before), _LEAST_RECLAIMED))
        return self.saved - before

    def requeue(self, req: Request, state: RequestState) -> None:
        """A poll found ``req`` with its row: its blocks that wait are measured, if their sources have
        theirs, and if SGLang may be short of slots soon."""
        state.recomputed = False
        if not self._measures:
            return
        waiting, state.pending = state.pending, []
        blocks: Batch = []
        for candidate in waiting:
            source = req if candidate.source is None else candidate.source()
            # Of a member that has left nothing is asked.
            if source is None or source.finished():
                state.candidates.pop(candidate.dst_start, None)
            elif has_row(source):
                blocks.append(self._block(req, candidate, source))
            else:
                state.pending.append(candidate)
        if blocks:
            self._waiting.append(blocks)

    def returning(self) -> set[int]:
        """``id`` of the requests with blocks on their way that shared before a retraction."""
        batches = [*self._waiting, self._in_flight[0] if self._in_flight else []]
        return {id(block.req) for batch in batches for block in batch if block.candidate.written}

    def forget(self, req: Request) -> None:
        """The row of ``req`` is gone. Blocks of others that would have read it wait for its next."""
        for entry in self.ledger.of(req):
            self.ledger.remove(entry)
            if entry.block.req is not req:
                _state_of(entry.block.req).pending.append(entry.block.candidate)

    def evicted(self, req: Request) -> None:
        """Positions of ``req`` were evicted: blocks that had, or read, any of them cannot share."""
        for entry in self.ledger.of(req):
            refusal = self._refusal_of(entry.block)
            if refusal is not None:
                self.ledger.remove(entry)
                self._refuse(entry.block, refusal)

    def give_up(self, state: RequestState, positions: int) -> None:
        """As many positions share no slot of their row any more."""
        state.live_positions -= positions
        self.within -= positions

    def reset(self) -> None:
        self.within = 0
        self.drop()

    def drop(self) -> None:
        """Forget what is on its way."""
        self._waiting.clear()
        self._in_flight = None
        self.ledger.clear()

    def _collect(self) -> bool:
        """Take the blocks of steps that the engine has compared; False when there are none."""
        blocks: Batch = []
        results = self.tracker.take(_TAKE_LIMIT, _MAX_BATCH)
        for req, result in results:
            state = None if req is None else state_of(req)
            if req is None or state is None:
                late = len(result.pairs) + len(result.across)
                self._stats.refusals[Refusal.LATE.value] += late
                continue
            # Asked here as well as later: which requests still exist may differ between
            # ranks, and the batches they make must not.
            for block in self._blocks(req, result):
                if not self._allows(block):
                    continue
                if state.claim(block.dst_start, block.length):
                    state.candidates[block.dst_start] = block.candidate
                    if self._measures:
                        blocks.append(block)
                    else:
                        state.pending.append(block.candidate)
                else:
                    self._refuse(block, Refusal.OVERLAP)
        if blocks:
            self._waiting.append(blocks)
        return bool(results)

    def _blocks(self, req: Request, result: StepResult) -> list[BlockProposal]:
        blocks = [self._block(req, Candidate(*pair), req) for pair in result.pairs]
        for dst, src, member in result.across:
            source = self.tracker.source(req, member)
            if source is None:
                self._stats.refusals[Refusal.LATE.value] += 1
            else:
                candidate = Candidate(dst, src, weakref.ref(source), source.rid)
                blocks.append(self._block(req, candidate, source))
        return blocks

    def _block(self, req: Request, candidate: Candidate, source: Request) -> BlockProposal:
        """``source``: in whose row ``src_start`` is, as the rows are now."""
        at = req, candidate, self.block, _state_of(req).row
        return (
            BlockProposal(*at)
            if source is req
            else BlockProposal(*at, source, _state_of(source).row)
        )

    def _launch(self) -> bool:
        """Measure the next blocks; False when none waits."""
        first: Batch = []
        while self._waiting and len(first) < _MAX_BATCH:
            first += self._waiting.popleft()
        if len(first) > _MAX_BATCH:
            self._waiting.appendleft(first[_MAX_BATCH:])
        batch = [block for block in first[:_MAX_BATCH] if self._allows(block)]
        if batch:
            self._in_flight = batch, self.meter.measure(batch)
        return bool(batch)

    def _judge(self, batch: Batch, measured: Measurement) -> None:
        """Enter what is accepted of a measured batch in the ledger."""
        # Every rank adds up the sums of the whole batch before any block is left out.
        distances = self.meter.distances(measured)
        allowed = [i for i, block in enumerate(batch) if self._allows(block)]
        fresh = [i for i in allowed if not batch[i].candidate.accepted]
        self._stats.blocks_compared += len(fresh)
        accepted = self.threshold.decide([distances[i] for i in fresh])
        too_far = {i for i, yes in zip(fresh, accepted, strict=True) if not yes}
        dst_slots, src_slots = measured.slots()
        for i in allowed:
            block = batch[i]
            if i in too_far:
                self._refuse(block, Refusal.DISTANCE if self.threshold.is_warm else Refusal.WARMUP)
                continue
            self._acceptor.locate(block.req, block.dst_start, dst_slots[i])
            self._acceptor.locate(block.lender, block.src_start, src_slots[i])
            refusal = self._refusal_of_merge(block)
            if refusal is None:
                block.candidate.accepted = True
                slots = 0 if self._acceptor.copies else block.length
                self.ledger.add(Entry(block, distances[i], slots))
            else:
                self._refuse(block, refusal)

    def _refusal_of_merge(self, block: BlockProposal) -> Refusal | None:
        """What only other blocks tell; None lets it have the positions of its source."""
        refusal = self._refusal_of_slots(block)
        if refusal is not None:
            return refusal
        merges, dst, src = (
            _state_of(block.req).merges,
            self._keys(block, True),
            self._keys(block, False),
        )
        if any(merges.is_across(key) for key in dst):
            return Refusal.ACROSS
        if max(merges.size(key) for key in dst) > MAX_READERS:
            return Refusal.READERS
        return None if merges.join(dst, src) else Refusal.SAME_SLOTS

    def _keys(self, block: BlockProposal, dst: bool) -> list[Key]:
        """Of its pages."""
        req, start = (block.req, block.dst_start) if dst else (block.lender, block.src_start)
        state = _state_of(req)
        at = range(start, start + block.length, self._acceptor.page)
        return [(state.number, state.row, position) for position in at]

    def _refusal_of_slots(self, block: BlockProposal) -> Refusal | None:
        """What only the slots tell."""
        if block.source is not None:
            lent = self._aliases(block.source).numbers(block.src_start, block.length)
            if any(0 <= number < block.source.kv.cache_protected_len for number in lent):
                return Refusal.TREE_OWNED
        dst = self._acceptor.slots(block.req, block.dst_start, block.length)
        if dst == self._acceptor.slots(block.lender, block.src_start, block.length):
            return Refusal.SAME_SLOTS
        if not _state_of(block.req).across.keys().isdisjoint(dst):
            return Refusal.ACROSS
        return None

    def _share(self, wanted: float) -> None:
        """Redirect blocks of the ledger, not many more than ``_MAX_BATCH``, until ``wanted`` slots
        will have come back."""
        planned: list[Planned] = []
        saved = moved = 0
        try:
            while saved < wanted and moved < _MAX_BATCH:
                entry = self.ledger.take()
                if entry is None:
                    break
                block = entry.block
                refusal = self._refusal_of(block) or self._refusal_of_slots(block)
                if refusal is not None:
                    self._stats.blocks_missed += 1
                    self._refuse(block, refusal)
                    continue
                planned.append(self._planned(block))
                saved += planned[-1].saved
                moved += 1 + len(planned[-1].redirections) // self.block
            redirections = [entry for each in planned for entry in each.redirections]
            if not redirections:
                return
            commit = self._acceptor.prepare(redirections)
            # All ranks are prepared: what follows does not fail, except where it copies.
            self._ranks.agree()
            for each in planned:
                each.state.mark_shared(entry.position for entry in each.redirections)
            commit()
        finally:
            self._acceptor.planned.clear()
        for each in planned:
            self._count(each)

    def _planned(self, block: BlockProposal) -> Planned:
        """What changes in the request's row. Ahead of it: only what shares or evicts reads this,
        which a failure ends; and what is marked as read across only stays where it is."""
        state, aliases, across = _state_of(block.req), self._aliases(block.req), 0
        dst_slots = self._acceptor.slots(block.req, block.dst_start, block.length)
        src_slots = self._acceptor.slots(block.lender, block.src_start, block.length)
        if block.source is None:
            moved = aliases.redirect(block.dst_start, block.src_start, block.length)
        else:
            lent = self._aliases(block.source).numbers(block.src_start, block.length)
            for slot, number in zip(src_slots, lent, strict=True):
                _state_of(block.source).across.setdefault(slot, number)
            across = sum(slot not in state.across for slot in set(src_slots))
            numbers = [state.across.setdefault(slot, -1 - slot) for slot in src_slots]
            moved = aliases.assign(block.dst_start, numbers)
        rows = block.req.kv.req_pool_idx, block.lender.kv.req_pool_idx
        redirections = [
            Redirection(
                *(rows[0], position, dst_slots[offset], src_slots[offset]),
                *(block.src_start + offset, rows[1]),
            )
            for position, offset in moved
            # An evicted position has no slot any more.
            if not state.evicted.any_in(position, position + 1)
        ]
        self._acceptor.plan(redirections)
        return Planned(block, state, redirections, len({offset for _, offset in moved}), across)

    def _count(self, planned: Planned) -> None:
        """A block was applied."""
        block, state, _, saved, across = planned
        candidate, fresh = block.candidate, not block.candidate.written
        candidate.written = written_positions(block.req)
        state.shared.append(candidate)
        self._stats.blocks_reapplied += not fresh
        self._stats.blocks_shared += fresh
        self._stats.blocks_shared_across += block.source is not None and fresh
        if not self._acceptor.copies:
            self.give_up(state, across - saved)
            state.foreign += across
            self._stats.slots_saved_total += saved
            self._stats.slots_saved_across_total += across

    def _refusal_of(self, block: BlockProposal) -> Refusal | None:
        return refusal_of(block, self._min_age, self._acceptor.page)

    def _allows(self, block: BlockProposal) -> bool:
        """Ask the rules; what they refuse is counted."""
        refusal = self._refusal_of(block)
        if refusal is not None:
            self._refuse(block, refusal)
        return refusal is None

    def _refuse(self, block: BlockProposal, refusal: Refusal) -> None:
        self._stats.refusals[refusal.value] += 1
        state, candidate = state_of(block.req), block.candidate
        if state is None or state.candidates.get(block.dst_start) is not candidate:
            return
        if refusal is not Refusal.LATE:
            del state.candidates[block.dst_start]
        elif state.row == block.row and not state.recomputed:
            # Its source has no row.
            state.pending.append(candidate)

    def _aliases(self, req: Request) -> SlotAliases:
        """What holds the same KV in a request: in one slot, or copied."""
        state = _state_of(req)
        return state.copied if self._acceptor.copies else state.slot_aliases


def _state_of(req: Request) -> RequestState:
    state = state_of(req)
    assert state is not None, "only requests with state propose blocks, or are their source"
    return state
