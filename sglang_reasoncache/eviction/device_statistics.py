# SPDX-License-Identifier: Apache-2.0
"""Attention statistics on a GPU, by a Triton kernel that CUDA graphs can hold."""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import Any

import torch

from sglang_reasoncache.cache.upload import upload
from sglang_reasoncache.eviction.statistics import (
    AttentionStatistics,
    Prefill,
    Spans,
    StatisticsUpdate,
)
from sglang_reasoncache.kernels import note_triton
from sglang_reasoncache.kernels.plan_triton import PlanBuffers
from sglang_reasoncache.kernels.row_plan import BatchRows


class DeviceStatistics(AttentionStatistics):
    """See :class:`AttentionStatistics`. Replays of a graph find a row's memory by its address."""

    def __init__(self, rows: torch.Tensor, *args: Any) -> None:
        super().__init__(rows, *args)
        self._bases = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        self._sizes = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)

    def _reserve(self, rows: list[int], lengths: list[int]) -> None:
        try:
            super()._reserve(rows, lengths)
            where = upload(rows, self._device)
            held = [self._memory.get(row) for row in rows]
            addresses = [0 if memory is None else memory.data_ptr() for memory in held]
            sizes = [0 if memory is None else memory.shape[1] for memory in held]
            self._bases[where] = upload(addresses, self._device)
            self._sizes[where] = upload(sizes, self._device, torch.int32)
        except BaseException:
            # Kernels would write to memory that is gone; now they write nothing.
            self._sizes.zero_()
            raise

    def warm_up(self, plan: PlanBuffers) -> None:
        """Compile. ``plan``: of row 0, which is no request's; nothing is written."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        prompts = note_triton.Prompts(zero.int(), zero, zero.int())
        weights = torch.zeros(len(plan.kv_indices), device=self._device)
        rows = BatchRows(plan, zero, zero, len(weights))
        for some in (None, prompts):
            self._noted(rows, weights, some).apply()

    def decode(self, rows: BatchRows, weights: torch.Tensor | None = None) -> StatisticsUpdate:
        if weights is not None:
            return self._noted(rows, weights)
        weights = torch.zeros(len(rows.plan.kv_indices), device=self._device)
        return self._noted(_kept(rows), weights)

    def _weighed(
        self, rows: BatchRows, prefill: Prefill, tokens: torch.Tensor, spans: Spans, *_: Any
    ) -> StatisticsUpdate:
        begin, end = spans
        # Where the weights of each request's first query begin.
        ends = torch.nn.functional.pad((end - begin).cumsum(0, dtype=torch.int64), (1, 0))
        first = list(accumulate(prefill.counts, initial=0))[:-1]
        prompts = note_triton.Prompts(
            upload(prefill.counts, self._device, torch.int32),
            ends[upload(first, self._device)],
            upload(prefill.added, self._device, torch.int32),
        )
        # An upper bound: evicted positions have no entry.
        entries = sum(c * n for c, n in zip(prefill.counts, prefill.lengths, strict=True))
        weights = torch.zeros(entries, device=self._device)
        update = self._noted(_kept(rows), weights, prompts)
        return update._replace(parts=[(tokens, spans, weights)])

    def _noted(
        self, rows: BatchRows, weights: torch.Tensor, prompts: note_triton.Prompts | None = None
    ) -> StatisticsUpdate:
        """``prompts``: which queries of a prefill; None: one of each request (decode)."""
        plan, requests, lengths, longest = rows
        read = weights, plan, requests, lengths, self._bases, self._sizes
        latest, total = self.needs.latest, self.needs.total
        apply = functools.partial(
            note_triton.note, *read, latest=latest, total=total, prompts=prompts
        )
        return StatisticsUpdate(weights, longest, apply)


def _kept(rows: BatchRows) -> BatchRows:
    """SGLang counts its lengths up while the forward runs."""
    return rows._replace(requests=rows.requests.clone(), lengths=rows.lengths.clone())
