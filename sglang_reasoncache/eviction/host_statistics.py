# SPDX-License-Identifier: Apache-2.0
"""Attention statistics in host memory, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.eviction.statistics import (
    AttentionStatistics,
    LastQueries,
    Prefill,
    StatisticsUpdate,
)

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.plan import RowPlan

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

    def _update(
        self,
        plan: RowPlan,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        of: tuple[Prefill, LastQueries] | None = None,
        weights: torch.Tensor | None = None,
    ) -> HostUpdate:
        ends = lengths.tolist()
        entries, rows, seen = len(plan.kv_indices), requests, lengths
        counts, added = [1] * len(ends), [end - 1 for end in ends]
        if of is not None:
            prefill, queries = of
            entries = int((queries.spans[1] - queries.spans[0]).sum())
            rows, seen = requests[queries.requests], lengths[queries.requests] - queries.behind
            counts, added = prefill.counts, prefill.added
        # Now, as the plan: rows may change before the weights are there.
        most = int(seen.max()) if len(seen) else 0
        held = self._rows[rows.long(), :most] >= 0
        held &= torch.arange(most) < seen[:, None]
        made = list(zip(requests.tolist(), ends, counts, added, strict=True))
        return HostUpdate(torch.zeros(entries), longest, held, made)

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
