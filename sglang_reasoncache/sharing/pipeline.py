# SPDX-License-Identifier: Apache-2.0
"""The way of a block pair: proposed, allowed, measured in a batch in flight, judged, applied.

Nothing here waits for the step engine or for a device, and no request does.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterable, Sequence

from sglang_reasoncache.compat.types import Request
from sglang_reasoncache.sharing.acceptor import Acceptor
from sglang_reasoncache.sharing.calibration import CalibratedThreshold
from sglang_reasoncache.sharing.decision import BlockProposal, Refusal, refusal_of
from sglang_reasoncache.sharing.measure import BlockMeter, Measurement
from sglang_reasoncache.sharing.ranks import Ranks
from sglang_reasoncache.sharing.state import RequestState, state_of
from sglang_reasoncache.sharing.stats import SharingStats
from sglang_reasoncache.sharing.tracker import RequestTracker

#: Finished steps taken from the engine at once, unless their blocks fill a batch before.
_TAKE_LIMIT = 256
#: Blocks measured at once, and about as many applied in one poll: many steps may end together.
_MAX_BATCH = 256

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
        stats: SharingStats,
        ranks: Ranks,
        block: int,
    ) -> None:
        self.threshold, self.meter, self.block = threshold, meter, block
        self.live_positions = 0
        self._tracker, self._acceptor = tracker, acceptor
        self._stats, self._ranks = stats, ranks
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
                self._apply(batch, measured)
                done += len(batch)
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
            for dst, src in state.shared
        ]
        state.shared = []
        self._queue([blocks])

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
        self._waiting.clear()
        self._in_flight = None

    def _collect(self) -> bool:
        """Queue the blocks of steps that the engine has compared; False when there are none."""
        per_request: dict[int, Batch] = {}
        results = self._tracker.take(_TAKE_LIMIT, _MAX_BATCH)
        for req, result in results:
            state = None if req is None else state_of(req)
            if req is None or state is None:
                self._stats.refusals[Refusal.LATE.value] += len(result.pairs)
                continue
            # Asked here as well as later: which requests still exist may differ between
            # ranks, and the batches they make must not.
            blocks = per_request.setdefault(result.request, [])
            for pair in result.pairs:
                block = BlockProposal(req, pair.dst_start, pair.src_start, self.block, state.row)
                if not self._allows(block):
                    continue
                if state.claim(block.dst_start, block.length):
                    blocks.append(block)
                else:
                    self._refuse(block, Refusal.OVERLAP)
        self._queue(per_request.values())
        return bool(results)

    def _queue(self, requests: Iterable[Batch]) -> None:
        batches: list[Batch] = []
        for blocks in requests:
            in_batches(blocks, batches)
        for batch in batches:
            parts = range(0, len(batch), _MAX_BATCH)
            self._waiting.extend(batch[i : i + _MAX_BATCH] for i in parts)

    def _launch(self) -> bool:
        """Measure the next batch; False when none waits."""
        while self._waiting:
            batch = [block for block in self._waiting.popleft() if self._allows(block)]
            if batch:
                self._in_flight = batch, self.meter.measure(batch)
                return True
        return False

    def _apply(self, batch: Batch, measured: Measurement) -> None:
        """Judge a measured batch and apply what is accepted."""
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
        for i, changed in zip(chosen, self._acceptor.apply(chosen, measured), strict=True):
            if changed:
                self._count_shared(batch[i])
            else:
                self._refuse(batch[i], Refusal.SAME_SLOTS)

    def _allows(self, block: BlockProposal) -> bool:
        """Ask the rules; what they refuse is counted."""
        refusal = refusal_of(block)
        if refusal is not None:
            self._refuse(block, refusal)
        return refusal is None

    def _refuse(self, block: BlockProposal, refusal: Refusal) -> None:
        self._stats.refusals[refusal.value] += 1
        state = state_of(block.req)
        if block.decided and refusal is Refusal.LATE and state is not None:
            # Retracted once more before it was applied: the decision stands.
            state.shared.append((block.dst_start, block.src_start))

    def _count_shared(self, block: BlockProposal) -> None:
        state = state_of(block.req)
        assert state is not None, "only requests with state propose blocks"
        state.shared.append((block.dst_start, block.src_start))
        state.mark_shared(block.dst_start)
        self._stats.blocks_reapplied += block.decided
        self._stats.blocks_shared += not block.decided
        if not self._acceptor.copies:
            state.slot_aliases.share(block.dst_start, block.src_start, block.length)
            self.give_up(state, -block.length)
            self._stats.slots_saved_total += block.length


def in_batches(blocks: Sequence[BlockProposal], batches: list[Batch]) -> None:
    """Distribute one request's ``blocks``, oldest first and of one length, over ``batches``.

    A block whose source was redirected by another block of the same call must
    be located after that one was applied, or it would share a freed slot.
    """
    # Destinations so far, sorted, and the batch of each. They do not overlap.
    starts: list[int] = []
    batch_of: dict[int, int] = {}
    for block in blocks:
        first = bisect.bisect_right(starts, block.src_start - block.length)
        last = bisect.bisect_left(starts, block.src_start + block.length)
        batch = max((batch_of[start] + 1 for start in starts[first:last]), default=0)
        bisect.insort(starts, block.dst_start)
        batch_of[block.dst_start] = batch
        if len(batches) <= batch:
            batches.append([])
        batches[batch].append(block)
