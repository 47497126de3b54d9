# SPDX-License-Identifier: Apache-2.0
"""The way of a block pair: proposed, allowed, measured in a batch in flight, judged, applied.

Nothing here waits for the step engine or for a device, and no request does.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.filter.proposal import StepResult
from sglang_reasoncache.sharing.acceptor import Acceptor, Redirection
from sglang_reasoncache.sharing.calibration import CalibratedThreshold
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal, refusal_of
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement
from sglang_reasoncache.sharing.state import RequestState, has_row, state_of
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Finished steps taken from the engine at once, unless their blocks fill a batch before.
_TAKE_LIMIT = 256
#: Blocks measured at once, and about as many applied in one poll: many steps may end together.
_MAX_BATCH = 256
#: Positions that move together: more save little and cost the scheduler's thread time.
MAX_READERS = 16

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
    """One per scheduler. A batch is applied when its distances have arrived on all ranks.

    Attributes:
        block: Tokens per block.
        tracker: Of the requests whose blocks these are.
        within: Slots that the running requests do without by sharing with themselves.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        meter: BlockMeter,
        acceptor: Acceptor,
        threshold: CalibratedThreshold,
        block: int,
        min_age: int = 0,
    ) -> None:
        self.threshold, self.meter, self.block = threshold, meter, block
        self.within = 0
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

        One batch at a time is measured, so the rows it was located in stay as they
        are until it is applied. Meanwhile steps pile up in the engine, which sheds.
        """
        done = 0
        while True:
            if self._in_flight is not None:
                batch, measured = self._in_flight
                if not measured.is_immediate and not self._ranks.least(measured.ready()):
                    return
                self._in_flight = None
                moved = self._apply(batch, measured)
                done += len(batch) + moved // self.block
            if done >= _MAX_BATCH:
                return
            if not self._waiting and not self._collect():
                return
            if not self._launch():
                # What was collected had no blocks, or came too late; it took some time too.
                done += 1

    def reapply(self, req: Request, state: RequestState) -> None:
        """Recomputed after a retraction: the row holds nothing shared, the decisions stand. Blocks
        of a source without a row wait for it in ``state.unread``."""
        if state.reapply:
            for written, dst, src, known, _ in state.shared_across:
                source = known()
                # A reference is hashed while what it refers to is there.
                if source is not None:
                    state.unread.setdefault(known, []).append((written, dst, src))
            if state.shared:
                state.unread.setdefault(weakref.ref(req), []).extend(state.shared)
            state.reapply, state.shared, state.shared_across = False, [], []
        blocks: Batch = []
        for known in list(state.unread):
            source = known()
            # Of a member that has left nothing is asked.
            if source is None or source.finished():
                del state.unread[known]
            elif has_row(source):
                decided = state.unread.pop(known)
                blocks += [self._block(req, *at[1:], source, decided=True) for at in decided]
        if blocks:
            self._waiting.append(blocks)

    def reapplying(self) -> set[int]:
        """``id`` of the requests with blocks that are yet to be applied again."""
        batches = [*self._waiting, self._in_flight[0] if self._in_flight else []]
        return {id(block.req) for batch in batches for block in batch if block.decided}

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

    def _collect(self) -> bool:
        """Queue the blocks of steps that the engine has compared; False when there are none."""
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
                    blocks.append(block)
                else:
                    self._refuse(block, Refusal.OVERLAP)
        if blocks:
            self._waiting.append(blocks)
        return bool(results)

    def _blocks(self, req: Request, result: StepResult) -> Iterable[BlockProposal]:
        for dst, src in result.pairs:
            yield self._block(req, dst, src, req)
        for dst, src, member in result.across:
            source = self.tracker.source(req, member)
            if source is None:
                self._stats.refusals[Refusal.LATE.value] += 1
            else:
                yield self._block(req, dst, src, source)

    def _block(
        self, req: Request, dst: int, src: int, source: Request, *, decided: bool = False
    ) -> BlockProposal:
        """``source``: in whose row ``src`` is, as the rows are now."""
        at = req, dst, src, self.block, _state_of(req).row, decided
        if source is req:
            return BlockProposal(*at)
        return BlockProposal(*at, source, _state_of(source).row)

    def _launch(self) -> bool:
        """Measure the next blocks that do not touch one another; False when none waits."""
        while self._waiting:
            # From several entries: what waits for one request's blocks holds up no other.
            first: Batch = []
            while self._waiting and len(first) < _MAX_BATCH:
                first += self._waiting.popleft()
            rest = first[_MAX_BATCH:]
            allowed = [block for block in first[:_MAX_BATCH] if self._allows(block)]
            batch, later = independent(allowed, self._acceptor.copies)
            if later or rest:
                self._waiting.appendleft(later + rest)
            if batch:
                self._in_flight = batch, self.meter.measure(batch)
                return True
        return False

    def _apply(self, batch: Batch, measured: Measurement) -> int:
        """Judge a measured batch and apply what is accepted; how many positions moved."""
        # Every rank adds up the sums of the whole batch before any block is left out.
        distances = self.meter.distances(measured)
        allowed = [i for i, block in enumerate(batch) if self._allows(block)]
        chosen = [i for i in allowed if batch[i].decided]
        fresh = [i for i in allowed if not batch[i].decided]
        self._stats.blocks_compared += len(fresh)
        threshold = self.threshold.threshold
        accepted = threshold.decide([distances[i] for i in fresh])
        too_far = Refusal.DISTANCE if threshold.is_warm else Refusal.WARMUP
        for i, yes in zip(fresh, accepted, strict=True):
            if yes:
                chosen.append(i)
            else:
                self._refuse(batch[i], too_far)
        dst_slots, src_slots = measured.slots()
        planned: list[Planned] = []
        for i in chosen:
            refusal = self._refusal(batch[i], dst_slots[i], src_slots[i])
            if refusal is None:
                planned.append(self._planned(batch[i], dst_slots[i], src_slots[i]))
            else:
                self._refuse(batch[i], refusal)
        redirections = [entry for each in planned for entry in each.redirections]
        if redirections:
            commit = self._acceptor.prepare(redirections)
            # All ranks are prepared: what follows does not fail, except where it copies.
            self._ranks.agree()
            for each in planned:
                each.state.mark_shared(entry.position for entry in each.redirections)
            commit()
        for each in planned:
            self._count(each)
        return len(redirections)

    def _refusal(
        self, block: BlockProposal, dst_slots: Sequence[int], src_slots: Sequence[int]
    ) -> Refusal | None:
        """What only the slots tell."""
        if dst_slots == src_slots:
            return Refusal.SAME_SLOTS
        if not _state_of(block.req).across.keys().isdisjoint(dst_slots):
            return Refusal.ACROSS
        if block.source is not None:
            lent = self._aliases(block.source).numbers(block.src_start, block.length)
            if any(0 <= number < block.source.kv.cache_protected_len for number in lent):
                return Refusal.TREE_OWNED
        if self._aliases(block.req).most(block.dst_start, self.block) > MAX_READERS:
            return Refusal.READERS
        return None

    def _planned(
        self, block: BlockProposal, dst_slots: Sequence[int], src_slots: Sequence[int]
    ) -> Planned:
        """What changes in the request's row. Ahead of it: only what shares or evicts reads this,
        which a failure ends; and what is marked as read across only stays where it is."""
        state, aliases, across = _state_of(block.req), self._aliases(block.req), 0
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
        return Planned(block, state, redirections, len({offset for _, offset in moved}), across)

    def _count(self, planned: Planned) -> None:
        """A block was applied."""
        block, state, _, saved, across = planned
        self._remember(block)
        self._stats.blocks_reapplied += block.decided
        self._stats.blocks_shared += not block.decided
        self._stats.blocks_shared_across += block.source is not None and not block.decided
        if not self._acceptor.copies:
            self.give_up(state, across - saved)
            state.foreign += across
            self._stats.slots_saved_total += saved
            self._stats.slots_saved_across_total += across

    def _remember(self, block: BlockProposal) -> None:
        """To be applied again after a retraction."""
        state = _state_of(block.req)
        at = written_positions(block.req), block.dst_start, block.src_start
        if block.source is None:
            state.shared.append(at)
        else:
            state.shared_across.append((*at, weakref.ref(block.source), block.source.rid))

    def _allows(self, block: BlockProposal) -> bool:
        """Ask the rules; what they refuse is counted."""
        refusal = refusal_of(block, self._min_age, self._acceptor.page)
        if refusal is not None:
            self._refuse(block, refusal)
        return refusal is None

    def _refuse(self, block: BlockProposal, refusal: Refusal) -> None:
        self._stats.refusals[refusal.value] += 1
        state = state_of(block.req)
        if block.decided and refusal is Refusal.LATE and state is not None:
            # A row was lost once more before it was applied: the decision stands.
            at = written_positions(block.req), block.dst_start, block.src_start
            state.unread.setdefault(weakref.ref(block.lender), []).append(at)

    def _aliases(self, req: Request) -> SlotAliases:
        return _aliases(req, self._acceptor.copies)


def _aliases(req: Request, copies: bool) -> SlotAliases:
    """What holds the same KV in a request: in one slot, or copied."""
    state = _state_of(req)
    return state.copied if copies else state.slot_aliases


def _state_of(req: Request) -> RequestState:
    state = state_of(req)
    assert state is not None, "only requests with state propose blocks, or are their source"
    return state


def independent(blocks: Iterable[BlockProposal], copies: bool = False) -> tuple[Batch, Batch]:
    """Blocks that may be located together, and the others, which must wait for them.

    A block waits that reads, or frees, slots that an earlier one redirects in the same row, or
    that frees slots which an earlier one reads there: located now, it would share a freed slot.
    """
    batch: Batch = []
    later: Batch = []
    # By request: numbers of slots that are freed, and that are read.
    touched: dict[int, tuple[set[int], set[int]]] = {}
    for block in blocks:
        freed, read = touched.setdefault(id(block.req), (set(), set()))
        given, lent = touched.setdefault(id(block.lender), (set(), set()))
        frees = _aliases(block.req, copies).numbers(block.dst_start, block.length)
        reads = _aliases(block.lender, copies).numbers(block.src_start, block.length)
        free = freed.isdisjoint(frees) and given.isdisjoint(reads) and read.isdisjoint(frees)
        (batch if free else later).append(block)
        # What waits holds up what comes behind it, so that the order stays.
        freed.update(frees)
        lent.update(reads)
    return batch, later
