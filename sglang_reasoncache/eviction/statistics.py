# SPDX-License-Identifier: Apache-2.0
"""Attention statistics: how much weight queries gave to the positions of each row.

Per position, not per slot, summed over query heads and layers. The host decides which queries
count when a batch is prepared. Weights stay on the pool's device until a policy reads them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.policies.contract import StatisticsNeeds
from sglang_reasoncache.kernels.row_plan import BatchRows

logger = logging.getLogger(__name__)

#: Numbers in host memory.
Ints = Sequence[int] | torch.Tensor
#: Begin and end of each query's entries, int32 ``[queries]``.
Spans = tuple[torch.Tensor, torch.Tensor]
#: Tokens of the batch, int64 ``[queries]``, their spans and their weights.
Part = tuple[torch.Tensor, Spans, torch.Tensor]

#: Least positions that a row's memory is for.
_LEAST = 256
#: Most weights of a prefill's queries: 256 MiB.
_WEIGHTS = 1 << 26
#: Most entries of a call for a prompt's queries in host memory: 64 MiB of logits under 32 heads.
_ENTRIES = 1 << 19
#: Bytes on a GPU that rows leave free for SGLang's forwards.
_SPARE = 512 << 20


class Prefill(NamedTuple):
    """Which queries of a prefill count. A number per request each."""

    counts: list[int]  # queries, the last ones
    added: list[int]  # positions whose totals go on; those behind begin anew
    lengths: list[int]  # positions, new ones included
    new: list[int]  # new tokens


class StatisticsUpdate(NamedTuple):
    """Weights of one forward. Every layer adds to ``weights``."""

    weights: torch.Tensor  # fp32, for each entry of the first query, then of the next
    longest: int  # most entries of a query
    apply: Callable[[], None]  # brings the weights of all layers to the rows, and zeroes them
    parts: Sequence[Part] = ()  # the queries of a prefill, for calls of decode attention


class AttentionStatistics:
    """One per attention backend, here in host memory; a GPU has a subclass.

    Takes ``4 * (needs.latest + needs.total)`` bytes for each position of a request, and half as
    much again for those to come. A row's memory is given back when another request gets the
    row. Without memory the positions of a request count as never attended to.

    Args:
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        generations: int64 ``[max_requests]`` in host memory, counts the requests that got each
            row (``req_generation``).
        needs: What the policies read.
        unowned: Rows that no request has now.

    Raises:
        MemoryError: there is no memory for a request of the whole context.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        generations: torch.Tensor,
        needs: StatisticsNeeds,
        unowned: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self.needs = needs
        self._rows, self._device, self._width = rows, rows.device, rows.shape[1]
        self._generations, self._unowned = generations, unowned
        #: Row -> fp32 ``[latest + total, positions]``: the weights by query q in
        #: ``q % latest``, their sums over all queries in the last row.
        self._memory: dict[int, torch.Tensor] = {}
        # Of each row: its owner's generation, first query that counted, positions, capacity.
        self._owner = np.full(len(rows), -1, dtype=np.int64)
        self._first, self._covered, self._capacity = np.zeros((3, len(rows)), dtype=np.int64)
        self._warned = False
        if self._allocated(self._width) is None:
            size = self._bytes(self._width)
            raise MemoryError(
                f"no {size} bytes for attention statistics of a request on {rows.device}"
            )

    # -- before a forward, on the host -------------------------------------------

    def begin(self, rows: Ints, lengths: Ints, new: Sequence[int] | None) -> Prefill | None:
        """A forward is about to be prepared: have memory, and decide which queries count.

        Args:
            rows, lengths: Of each request, in host memory; positions with the new ones.
            new: New tokens of each request; None: one each (decode).
        """
        where, ends = np.asarray(rows, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        prefill = None
        if new is not None:
            prefill = self._begin_prefill(where.tolist(), ends.tolist(), list(new))
        short = ends > self._capacity[where]
        if short.any():
            self._reserve(where[short].tolist(), ends[short].tolist())
        self._covered[where] = ends
        return prefill

    def _begin_prefill(self, rows: list[int], lengths: list[int], new: list[int]) -> Prefill:
        counts, added = [], []
        # The same on all ranks: they have the same lengths.
        most = min(self.needs.prompt, max(1, _WEIGHTS // max(sum(lengths), 1)))
        for row, length, count in zip(rows, lengths, new, strict=True):
            generation = int(self._generations[row])
            follows = self._owner[row] == generation and length - count == self._covered[row]
            # One position that follows may be a decoding request's, in a batch with prompts.
            queries = 1 if count == 1 and follows else min(count, most)
            goes_on = follows and queries == count
            if self._owner[row] != generation:
                self._forget(row, generation)
            if not goes_on:
                self._first[row] = length - queries
            counts.append(queries)
            added.append(length - count if goes_on else 0)
        return Prefill(counts, added, lengths, new)

    def _forget(self, row: int, owner: int) -> None:
        self._memory.pop(row, None)
        self._owner[row], self._capacity[row] = owner, 0

    def _reserve(self, rows: list[int], lengths: list[int]) -> None:
        """Have memory for as many positions of each row; its weights stay."""
        for row, length in zip(rows, lengths, strict=True):
            size = min(self._width, max(_LEAST, length + length // 2))
            memory, old = self._allocated(size), self._memory.pop(row, None)
            if memory is None:
                self._capacity[row] = self._width
                continue
            if old is not None:
                memory[:, : old.shape[1]] = old
                # What was to be cleared behind the newest queries, and had no capacity.
                memory[:, old.shape[1] : old.shape[1] + self.needs.latest] = 0
            self._memory[row], self._capacity[row] = memory, size

    def _allocated(self, size: int) -> torch.Tensor | None:
        """fp32 ``[latest + total, size]``, not cleared; None, logged once: there is no memory."""
        fits = self._fits(self._bytes(size))
        if not fits:
            # Finished requests keep their memory until their rows have new owners.
            for row in self._unowned():
                self._forget(row, -1)
            fits = self._fits(self._bytes(size))
        reason: object = f"less than {_SPARE >> 20} MiB would be left"
        if fits:
            shape = (self.needs.latest + self.needs.total, size)
            try:
                return torch.empty(shape, device=self._device)
            except RuntimeError as error:
                reason = error
        if not self._warned:
            self._warned = True
            logger.warning(
                "reasoncache: no memory for attention statistics of a request, its positions "
                "count as never attended to: %s",
                reason,
            )
        return None

    def _bytes(self, size: int) -> int:
        return 4 * (self.needs.latest + self.needs.total) * size

    def _fits(self, size: int) -> bool:
        """Whether the device has as many bytes to spare."""
        if self._device.type != "cuda":
            return True
        reserved = torch.cuda.memory_reserved(self._device)
        cached = reserved - torch.cuda.memory_allocated(self._device)
        return torch.cuda.mem_get_info(self._device)[0] + cached >= size + _SPARE

    # -- a forward ------------------------------------------------------------------

    def decode(self, rows: BatchRows, weights: torch.Tensor | None = None) -> StatisticsUpdate:
        """The update by a decode step.

        ``weights``: of a CUDA graph, zeros as long as the plan. ``rows`` then names the graph's
        buffers, read when it is replayed.
        """
        ends, ones = rows.lengths.tolist(), [1] * len(rows.lengths)
        return self.prefill(rows, Prefill(ones, [end - 1 for end in ends], ends, ones))

    def prefill(self, rows: BatchRows, prefill: Prefill) -> StatisticsUpdate:
        """The update by a prefill, without waiting for a GPU.

        ``prefill``: of :meth:`begin`. Without a query the totals begin anew all the same.
        """
        counts = np.asarray(prefill.counts, dtype=np.int64)
        # Of each query: its request in the batch, and how many queries of that come after it.
        of = np.repeat(np.arange(len(counts)), counts)
        behind = np.repeat(counts.cumsum(), counts) - 1 - np.arange(len(of))
        tokens = np.repeat(np.cumsum(prefill.new), counts) - 1 - behind
        requests, left = upload(of, self._device), upload(behind, self._device, torch.int32)
        indptr = rows.plan.kv_indptr
        spans = indptr[requests], indptr[requests + 1] - left
        return self._weighed(rows, prefill, upload(tokens, self._device), spans, (requests, left))

    def _weighed(
        self,
        rows: BatchRows,
        prefill: Prefill,
        tokens: torch.Tensor,
        spans: Spans,
        order: tuple[torch.Tensor, torch.Tensor],
    ) -> StatisticsUpdate:
        """``order``: requests of the queries, and how many queries of these come after each."""
        (begin, end), (of, left) = spans, order
        ends, seen = (end - begin).cumsum(0).tolist(), rows.lengths[of] - left
        weights, most = torch.zeros(max(ends, default=0)), int(seen.max()) if len(seen) else 0
        # Now, as the plan: rows may change before the weights are there.
        held = self._rows[rows.requests[of].long(), :most] >= 0
        held &= torch.arange(most) < seen[:, None]
        each = rows.requests.tolist(), rows.lengths.tolist(), prefill.counts, prefill.added
        # Some queries at a time: a call keeps the logits of all its entries.
        parts, first, at = [], 0, 0
        for stop, entries in enumerate(ends, 1):
            if entries - at >= _ENTRIES or stop == len(ends):
                some = slice(first, stop)
                parts.append((tokens[some], (begin[some], end[some]), weights[at:entries]))
                first, at = stop, entries
        apply = functools.partial(self._apply, weights, held, *each)
        return StatisticsUpdate(weights, rows.longest, apply, parts)

    def _apply(self, given: torch.Tensor, held: torch.Tensor, *each: list[int]) -> None:
        """``each``: requests' rows, positions, queries, and positions whose totals go on."""
        weights = torch.zeros(held.shape).masked_scatter_(held, given)
        at = 0
        for row, length, count, added in zip(*each, strict=True):
            memory = self._memory.get(row)
            if memory is not None:
                self._add(memory, weights[at : at + count, :length], length, added)
            at += count
        # As on a device: what was brought to the rows counts once.
        given.zero_()

    def _add(self, memory: torch.Tensor, weights: torch.Tensor, length: int, added: int) -> None:
        """``weights``: ``[queries, length]`` of a row's last queries."""
        latest = self.needs.latest
        if self.needs.total:
            total = memory[latest]
            total[added:length] = 0
            if len(weights):
                total[:length] += weights[0] if len(weights) == 1 else weights.sum(dim=0)
        # Slices, not indices: this is done for every request in every decode step.
        for left, query in enumerate(reversed(weights[-latest:] if latest else ())):
            row = memory[(length - 1 - left) % latest]
            row[:length] = query
            # For as many positions as there will be before it is written again.
            row[length : length + latest] = 0

    # -- for a policy, between forwards ---------------------------------------------

    def total(self, row: int, positions: np.ndarray) -> torch.Tensor:
        """fp64 ``[positions]`` on the device: weights by all queries since the end of the
        prompt's last chunk, and by the last ``StatisticsNeeds.prompt`` ones of that.

        The stream must be behind the forwards. ``positions``: int64, held ones.

        Raises:
            LookupError: the needs do not name it.
        """
        if not self.needs.total:
            raise LookupError("no policy announced that it reads total weights")
        return self._mean(row, positions, [self.needs.latest])

    def latest(self, row: int, positions: np.ndarray, queries: int) -> torch.Tensor:
        """fp64 ``[positions]`` on the device: mean of the weights by the ``queries`` newest ones,
        or by as many as counted. A position behind a query got nothing from it.

        Arguments and errors: see :meth:`total`.
        """
        if not 0 < queries <= self.needs.latest:
            raise LookupError(f"no policy announced that it reads the latest {queries} queries")
        covered = int(self._covered[row])
        first = max(int(self._first[row]), covered - queries)
        return self._mean(
            row, positions, [query % self.needs.latest for query in range(first, covered)]
        )

    def _mean(self, row: int, positions: np.ndarray, lines: list[int]) -> torch.Tensor:
        """Of some lines of the row's memory; zeros where its request has none."""
        memory = self._memory.get(row)
        if memory is None or not lines or self._owner[row] != int(self._generations[row]):
            return torch.zeros(len(positions), dtype=torch.float64, device=self._device)
        at = upload(lines, self._device)[:, None]
        return memory[at, upload(np.asarray(positions), self._device)].double().mean(dim=0)
