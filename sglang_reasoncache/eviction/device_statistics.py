# SPDX-License-Identifier: Apache-2.0
"""How much weight queries gave to the positions of each row, noted on a GPU.

What :class:`~sglang_reasoncache.eviction.statistics.AttentionStatistics` is in host memory.
Which queries are observed is settled on the host when a batch is built; their weights
never leave the device but for a policy that asks for some.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.policies.contract import Observation
from sglang_reasoncache.kernels.note_triton import Prompts, note
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.plan_triton import PlanBuffers

logger = logging.getLogger(__name__)

#: Numbers in host memory.
Ints = Sequence[int] | torch.Tensor

#: Least positions that a row's memory is for.
_LEAST = 256
#: Weights of a prefill's queries: 256 MiB.
_WEIGHTS = 1 << 26
#: Bytes on the device that rows do not take: SGLang's forwards need some.
_SPARE = 512 << 20


@dataclass(frozen=True)
class Batch:
    """What a prefill that is being prepared has to note.

    Attributes:
        counts: Queries of each request, its last ones.
        added: Positions of each request whose totals go on.
        lengths: Positions of each request.
        new: New tokens of each.
    """

    counts: list[int]
    added: list[int]
    lengths: list[int]
    new: list[int]


@dataclass(frozen=True)
class Noted:
    """A forward whose weights are noted. Every layer adds to ``weights``.

    Attributes:
        weights: fp32, of the entries of the first query, then of the next, and so on.
        plan: What the queries read.
        requests, lengths: int ``[batch]``, rows and their positions. Not SGLang's own where it
            goes on to count them up while the forward runs.
        longest: Most entries of a query.
        prompts: Which queries of a prefill; None: one of each request (decode).
    """

    weights: torch.Tensor
    plan: PlanBuffers
    requests: torch.Tensor
    lengths: torch.Tensor
    longest: int
    prompts: Prompts | None = None


@dataclass(frozen=True)
class Queries:
    """The last queries of a prefill, as decode attention takes them.

    Attributes:
        tokens: int64 ``[queries]``, which tokens of the batch they are.
        spans: int32 ``[queries]`` each, begin and end of their entries.
        rows: What the spans are of.
    """

    tokens: torch.Tensor
    spans: tuple[torch.Tensor, torch.Tensor]
    rows: RowPlan


class DeviceStatistics:
    """One per attention backend.

    ``4 * (wanted.latest + wanted.total)`` bytes on the device for each position of a request,
    and half as much again for those to come. A row's memory is given back when another request
    gets the row.

    Args:
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        generations: int64 ``[max_requests]`` in host memory, counts the requests that got each
            row (``req_generation``).
        wanted: What the policies read.
        unowned: Rows that no request has now.

    Raises:
        MemoryError: there is no memory for a request of the whole context.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        generations: torch.Tensor,
        wanted: Observation,
        unowned: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self.wanted = wanted
        self._unowned = unowned
        self._device = rows.device
        self._generations = generations
        self._places = wanted.latest + wanted.total
        self._width = rows.shape[1]
        count = len(rows)
        self._memory: dict[int, torch.Tensor] = {}
        self._bases = torch.zeros(count, dtype=torch.int64, device=rows.device)
        self._sizes = torch.zeros(count, dtype=torch.int32, device=rows.device)
        # On the host: owner of a row, its first observed query, its positions, its memory's.
        self._owner = np.full(count, -1, dtype=np.int64)
        self._first = np.zeros(count, dtype=np.int64)
        self._covered = np.zeros(count, dtype=np.int64)
        self._room = np.zeros(count, dtype=np.int64)
        self._short = False
        if self._allocated(self._width) is None:
            raise MemoryError(
                f"no {4 * self._places * self._width} bytes on {rows.device} for attention "
                "statistics of a request"
            )

    # -- before a forward, on the host -------------------------------------------

    def begin(self, rows: Ints, lengths: Ints, new: Sequence[int] | None) -> Batch | None:
        """A forward is about to be prepared: have memory, and settle what a prefill notes.

        Args:
            rows, lengths: Of each request, in host memory; positions with the new ones.
            new: New tokens of each request; None: one each (decode).
        """
        where, ends = np.asarray(rows, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        batch = None if new is None else self._settle(where.tolist(), ends.tolist(), new)
        short = ends > self._room[where]
        if short.any():
            self._reserve(where[short], ends[short])
        self._covered[where] = ends
        return batch

    def _settle(self, rows: list[int], lengths: list[int], new: Sequence[int]) -> Batch:
        counts, added = [], []
        # The same on all ranks: they have the same lengths.
        most = min(self.wanted.prompt, max(1, _WEIGHTS // max(sum(lengths), 1)))
        for row, length, count in zip(rows, lengths, new, strict=True):
            generation = int(self._generations[row])
            follows = self._owner[row] == generation and length - count == self._covered[row]
            # One position that follows may be a decoding request's, in a batch with prompts.
            observed = 1 if count == 1 and follows else min(count, most)
            goes_on = follows and observed == count
            if self._owner[row] != generation:
                self._owner[row] = generation
                self._memory.pop(row, None)
                self._room[row] = 0
            if not goes_on:
                self._first[row] = length - observed
            counts.append(observed)
            added.append(length - count if goes_on else 0)
        return Batch(counts, added, lengths, list(new))

    def _reserve(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Have memory for as many positions of each row; what was noted stays."""
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            size = min(self._width, max(_LEAST, length + length // 2))
            memory, old = self._allocated(size), self._memory.pop(row, None)
            if memory is None:
                self._room[row] = self._width
                continue
            if old is not None:
                memory[:, : old.shape[1]] = old
                # What was to be cleared behind the newest queries, and had no room.
                memory[:, old.shape[1] : old.shape[1] + self.wanted.latest] = 0
            self._memory[row], self._room[row] = memory, size
        where = upload(rows, self._device)
        held = [self._memory.get(row) for row in rows.tolist()]
        addresses = [0 if memory is None else memory.data_ptr() for memory in held]
        sizes = [0 if memory is None else memory.shape[1] for memory in held]
        self._bases[where] = upload(addresses, self._device)
        self._sizes[where] = upload(sizes, self._device, torch.int32)

    def _allocated(self, size: int) -> torch.Tensor | None:
        """fp32 ``[places, size]``, not cleared; None, said once: there is no memory."""
        wanted = 4 * self._places * size
        there = self._has(wanted)
        if not there:
            # What was noted of finished requests is there until their rows have new owners.
            for row in self._unowned():
                self._memory.pop(row, None)
                self._room[row] = 0
                self._owner[row] = -1
            there = self._has(wanted)
        reason: object = f"less than {_SPARE >> 20} MiB would be left"
        if there:
            try:
                return torch.empty((self._places, size), device=self._device)
            except RuntimeError as error:
                reason = error
        if not self._short:
            self._short = True
            logger.warning(
                "reasoncache: no memory for attention statistics of a request, its positions "
                "count as never looked at: %s",
                reason,
            )
        return None

    def _has(self, wanted: int) -> bool:
        """Whether the device has as many bytes to spare."""
        if self._device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(self._device)[0]
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free + cached >= wanted + _SPARE

    def warm_up(self, plan: PlanBuffers) -> None:
        """Compile what notes. ``plan``: of row 0, which is no request's; nothing is written."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        prompts = Prompts(zero.int(), zero, zero.int())
        weights = torch.zeros(len(plan.kv_indices), device=self._device)
        for some in (None, prompts):
            self.note(Noted(weights, plan, zero, zero, len(weights), some))

    # -- a forward, on the device --------------------------------------------------

    def of_decode(
        self,
        plan: PlanBuffers,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        weights: torch.Tensor | None = None,
    ) -> Noted:
        """What a decode step notes.

        Args:
            plan: Of its rows, with ``positions``.
            requests, lengths: int ``[batch]``, on the device.
            longest: Most entries of a row.
            weights: Of a CUDA graph: zeros as long as the plan; ``requests`` and ``lengths``
                are then its buffers, and are read when it is replayed.
        """
        if weights is not None:
            return Noted(weights, plan, requests, lengths, longest)
        weights = torch.zeros(len(plan.kv_indices), device=self._device)
        return Noted(weights, plan, requests.clone(), lengths.clone(), longest)

    def of_prompts(
        self,
        batch: Batch,
        plan: PlanBuffers,
        rows: RowPlan,
        requests: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[Noted, Queries]:
        """What a prefill notes. Waits for nothing.

        Args:
            batch: Of :meth:`begin`. Without a query it is noted all the same: totals begin anew.
            plan, rows: Of its rows, with ``positions``, as planned and as read.
            requests, lengths: int ``[batch]``, on the device.
        """
        of: list[int] = []
        left: list[int] = []
        tokens: list[int] = []
        at = 0
        for b, (count, new) in enumerate(zip(batch.counts, batch.new, strict=True)):
            of += [b] * count
            left += range(count - 1, -1, -1)
            tokens += range(at + new - count, at + new)
            at += new
        # EvictedPositions make it less.
        room = sum(c * n for c, n in zip(batch.counts, batch.lengths, strict=True))
        which, behind = upload(of, self._device), upload(left, self._device, torch.int32)
        spans = plan.kv_indptr[which], plan.kv_indptr[which + 1] - behind
        ends = (spans[1] - spans[0]).cumsum(0, dtype=torch.int64)
        # Of each request's first query: what all queries before it have.
        ends = torch.nn.functional.pad(ends, (1, 0))
        first = list(accumulate(batch.counts, initial=0))[:-1]
        prompts = Prompts(
            upload(batch.counts, self._device, torch.int32),
            ends[upload(first, self._device)],
            upload(batch.added, self._device, torch.int32),
        )
        noted = Noted(
            torch.zeros(room, device=self._device),
            plan,
            requests.clone(),
            lengths.clone(),
            max(batch.lengths, default=0),
            prompts,
        )
        return noted, Queries(upload(tokens, self._device), spans, rows)

    def note(self, done: Noted) -> None:
        """Bring the weights of all layers to the rows. Can be captured in a CUDA graph."""
        note(
            done.weights,
            done.plan,
            done.requests,
            done.lengths,
            self._bases,
            self._sizes,
            latest=self.wanted.latest,
            total=self.wanted.total,
            prompts=done.prompts,
        )

    # -- for a policy, between forwards ---------------------------------------------

    def total(self, row: int, positions: torch.Tensor) -> torch.Tensor:
        """fp64 ``[positions]``, in host memory: see ``AttentionStatistics.total``.

        The device must have done what is queued.
        """
        if not self.wanted.total:
            raise LookupError("no policy announced that it reads total weights")
        memory = self._known(row)
        if memory is None:
            return torch.zeros(len(positions), dtype=torch.float64)
        return memory[self.wanted.latest, positions.to(self._device)].cpu().double()

    def latest(self, row: int, positions: torch.Tensor, queries: int) -> torch.Tensor:
        """fp64 ``[positions]``, in host memory: see ``AttentionStatistics.latest``.

        The device must have done what is queued.
        """
        if not 0 < queries <= self.wanted.latest:
            raise LookupError(f"no policy announced that it reads the latest {queries} queries")
        memory, covered = self._known(row), int(self._covered[row])
        first = max(int(self._first[row]), covered - queries)
        if memory is None or first >= covered:
            return torch.zeros(len(positions), dtype=torch.float64)
        places = torch.arange(first, covered) % self.wanted.latest
        found = memory[places[:, None].to(self._device), positions.to(self._device)]
        return found.cpu().double().mean(dim=0)

    def _known(self, row: int) -> torch.Tensor | None:
        """What was noted of the request that has the row; None: nothing."""
        if self._owner[row] != int(self._generations[row]):
            return None
        return self._memory.get(row)
