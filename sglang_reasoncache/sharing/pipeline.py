# SPDX-License-Identifier: Apache-2.0
"""The way of a block pair: proposed, allowed, measured in a batch in flight, judged, applied.

Nothing here waits for the step engine or for a device, and no request does.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.eviction.row_state import written_positions
from sglang_reasoncache.sharing.acceptor import Acceptor, Redirection
from sglang_reasoncache.sharing.calibration import CalibratedThreshold
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal, refusal_of
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement
from sglang_reasoncache.sharing.state import RequestState, state_of
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Finished steps taken from the engine at once, unless their blocks fill a batch before.
_TAKE_LIMIT = 256
#: Blocks measured at once, and about as many applied in one poll: many steps may end together.
_MAX_BATCH = 256
#: Positions that move together: more save little and cost the scheduler's thread time.
MAX_READERS = 16

Batch = list[BlockProposal]


class BlockPipeline:
    """One per scheduler. A batch is applied when its distances have arrived on all ranks.

    Attributes:
        block: Tokens per block.
        live_positions: Slots that the running requests do without by sharing.
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
        self.live_positions = 0
        self._tracker, self._acceptor = tracker, acceptor
        self._stats, self._ranks, self._min_age = tracker.stats, tracker.ranks, min_age
        self._waiting: collections.deque[Batch] = collections.deque()
        self._in_flight: tuple[Batch, Measurement] | None = None

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
        """Recomputed after a retraction: the row holds nothing shared, the decisions stand."""
        state.reapply = False
        blocks = [
            BlockProposal(req, dst, src, self.block, state.row, decided=True)
            for _, dst, src in state.shared
        ]
        state.shared = []
        self._waiting.append(blocks)

    def reapplying(self) -> set[int]:
        """``id`` of the requests with blocks that are yet to be applied again."""
        batches = [*self._waiting, self._in_flight[0] if self._in_flight else []]
        return {id(block.req) for batch in batches for block in batch if block.decided}

    def give_up(self, state: RequestState, positions: int) -> None:
        """As many positions share no slot any more."""
        state.live_positions -= positions
        self.live_positions -= positions

    def reset(self) -> None:
        self.live_positions = 0
        self.drop()

    def drop(self) -> None:
        """Forget what is on its way."""
        self._waiting.clear()
        self._in_flight = None

    def _collect(self) -> bool:
        """Queue the blocks of steps that the engine has compared; False when there are none."""
        blocks: Batch = []
        results = self._tracker.take(_TAKE_LIMIT, _MAX_BATCH)
        for req, result in results:
            state = None if req is None else state_of(req)
            if req is None or state is None:
                self._stats.refusals[Refusal.LATE.value] += len(result.pairs)
                continue
            # Asked here as well as later: which requests still exist may differ between
            # ranks, and the batches they make must not.
            for pair in result.pairs:
                block = BlockProposal(req, pair.dst_start, pair.src_start, self.block, state.row)
                if not self._allows(block):
                    continue
                if state.claim(block.dst_start, block.length):
                    blocks.append(block)
                else:
                    self._refuse(block, Refusal.OVERLAP)
        if blocks:
            self._waiting.append(blocks)
        return bool(results)

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
        planned: list[tuple[BlockProposal, RequestState, list[Redirection], int]] = []
        copies = self._acceptor.copies
        for i in chosen:
            if dst_slots[i] == src_slots[i]:
                self._refuse(batch[i], Refusal.SAME_SLOTS)
            elif _aliases(batch[i], copies).most(batch[i].dst_start, self.block) > MAX_READERS:
                self._refuse(batch[i], Refusal.READERS)
            else:
                planned.append(self._planned(batch[i], dst_slots[i], src_slots[i]))
        redirections = [entry for _, _, entries, _ in planned for entry in entries]
        if redirections:
            commit = self._acceptor.prepare(redirections)
            # All ranks are prepared: what follows does not fail, except where it copies.
            self._ranks.agree()
            for _, state, entries, _ in planned:
                state.mark_shared(entry.position for entry in entries)
            commit()
        for block, state, _, saved in planned:
            self._count(block, state, saved)
        return len(redirections)

    def _planned(
        self, block: BlockProposal, dst_slots: Sequence[int], src_slots: Sequence[int]
    ) -> tuple[BlockProposal, RequestState, list[Redirection], int]:
        """What changes in the request's row, and how many slots that saves."""
        state, kv = _state(block), block.req.kv
        # Ahead of the row: only what shares or evicts reads it, which a failure ends.
        moved = _aliases(block, self._acceptor.copies).redirect(
            block.dst_start, block.src_start, block.length
        )
        row, source = kv.req_pool_idx, block.src_start
        redirections = [
            Redirection(row, position, dst_slots[offset], src_slots[offset], source + offset)
            for position, offset in moved
            # An evicted position has no slot any more.
            if not state.evicted.any_in(position, position + 1)
        ]
        return block, state, redirections, len({offset for _, offset in moved})

    def _count(self, block: BlockProposal, state: RequestState, saved: int) -> None:
        """A block was applied."""
        state.shared.append((written_positions(block.req), block.dst_start, block.src_start))
        self._stats.blocks_reapplied += block.decided
        self._stats.blocks_shared += not block.decided
        if not self._acceptor.copies:
            self.give_up(state, -saved)
            self._stats.slots_saved_total += saved

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
            # Retracted once more before it was applied: the decision stands.
            state.shared.append((written_positions(block.req), block.dst_start, block.src_start))


def _aliases(block: BlockProposal, copies: bool) -> SlotAliases:
    """What holds the same KV in the block's request: in one slot, or copied."""
    state = _state(block)
    return state.copied if copies else state.slot_aliases


def _state(block: BlockProposal) -> RequestState:
    state = state_of(block.req)
    assert state is not None, "only requests with state propose blocks"
    return state


def independent(blocks: Iterable[BlockProposal], copies: bool = False) -> tuple[Batch, Batch]:
    """Blocks that may be located together, and the others, which must wait for them.

    A block waits that reads, or frees, slots that an earlier one of its request redirects, or
    that frees slots which an earlier one reads: located now, it would share a freed slot.
    """
    batch: Batch = []
    later: Batch = []
    # By request: numbers of slots that are freed, and that are read.
    touched: dict[int, tuple[set[int], set[int]]] = {}
    for block in blocks:
        freed, read = touched.setdefault(id(block.req), (set(), set()))
        aliases = _aliases(block, copies)
        frees = aliases.numbers(block.dst_start, block.length)
        reads = aliases.numbers(block.src_start, block.length)
        free = freed.isdisjoint(frees) and freed.isdisjoint(reads) and read.isdisjoint(frees)
        (batch if free else later).append(block)
        # What waits holds up what comes behind it, so that the order stays.
        freed.update(frees)
        read.update(reads)
    return batch, later
