# SPDX-License-Identifier: Apache-2.0
"""Attention statistics in host memory, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_reasoncache.eviction.statistics import (
    AttentionStatistics,
    LastQueries,
    Prefill,
    StatisticsUpdate,
)
from sglang_reasoncache.kernels.batch import BatchRows

#: Most entries of a call for a prompt's queries: 64 MiB of logits under 32 heads.
_ENTRIES = 1 << 19


@dataclass(frozen=True)
class HostUpdate(StatisticsUpdate):
    """Attributes:
    held: bool ``[queries, positions]``, which positions the entries belong to.
    requests: Row, positions, queries, and positions whose totals go on, of each request.
    """

    held: torch.Tensor
    requests: list[tuple[int, int, int, int]]


class HostStatistics(AttentionStatistics):
    """See :class:`AttentionStatistics`; weights are computed by a few calls of decode attention."""

    def decode(self, rows: BatchRows, weights: torch.Tensor | None = None) -> HostUpdate:
        ends, entries = rows.lengths.tolist(), len(rows.plan.kv_indices)
        held = self._held(rows.requests, rows.lengths)
        added = [end - 1 for end in ends]
        made = list(zip(rows.requests.tolist(), ends, [1] * len(ends), added, strict=True))
        return HostUpdate(torch.zeros(entries), rows.longest, held, made)

    def _prefill_update(
        self, rows: BatchRows, prefill: Prefill, queries: LastQueries
    ) -> HostUpdate:
        begin, end = queries.spans
        of, seen = rows.requests[queries.requests], rows.lengths[queries.requests] - queries.behind
        requests, ends = rows.requests.tolist(), rows.lengths.tolist()
        made = list(zip(requests, ends, prefill.counts, prefill.added, strict=True))
        entries = torch.zeros(int((end - begin).sum()))
        return HostUpdate(entries, rows.longest, self._held(of, seen), made)

    def _held(self, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Now, as the plan: rows may change before the weights are there."""
        most = int(seen.max()) if len(seen) else 0
        held = self._rows[rows.long(), :most] >= 0
        return held & (torch.arange(most) < seen[:, None])

    def parts(
        self, queries: LastQueries, update: StatisticsUpdate
    ) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """Some queries at a time: a call keeps the logits of all its entries."""
        begin, end = queries.spans
        first = at = 0
        for stop, entries in enumerate((end - begin).cumsum(0).tolist(), 1):
            if entries - at < _ENTRIES and stop < len(begin):
                continue
            some = slice(first, stop)
            yield queries.tokens[some], (begin[some], end[some]), update.weights[at:entries]
            first, at = stop, entries

    def apply(self, update: HostUpdate) -> None:
        weights = torch.zeros(update.held.shape).masked_scatter_(update.held, update.weights)
        at = 0
        for row, length, count, added in update.requests:
            memory = self._memory.get(row)
            if memory is not None:
                self._add(memory, weights[at : at + count, :length], length, added)
            at += count
        # As on a device: what was brought to the rows counts once.
        update.weights.zero_()

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
