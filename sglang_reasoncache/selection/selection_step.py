# SPDX-License-Identifier: Apache-2.0
"""The pages of a decode step's rows on a device, once for all its layers.

Of fixed shape, and nothing is waited for. Layers read this and the step's plan, never rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_reasoncache.kernels.plan import RowPlan

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers


@dataclass(frozen=True)
class Room:
    """Where the selected entries of a layer go, layer after layer.

    Attributes:
        plan: Its ``positions`` are where entries are in the whole plan.
        weights: fp32, of these entries, zeros between layers; None: nobody asks.
    """

    plan: PlanBuffers
    weights: torch.Tensor | None


@dataclass(frozen=True)
class Step:
    """What all layers of a decode step choose from.

    Attributes:
        lengths: int64 ``[rows]``.
        named: The pages of one row after the other, ``[rows * pages]``; below 0 where their
            bounds tell nothing.
        spans: int32 ``[rows]`` each, which of them are within a row's length.
        index: int64 ``[rows, pages]``, where the share of a page is among theirs.
        held: bool ``[rows, pages]``, which pages the rows have.
        state: uint8, likewise, see ``select_triton``.
        newest: int64 ``[rows]``, the page that is being filled.
        whole: The plan that is selected from.
        room: Where to.
        strict: What a selector does wrong ends the start.
    """

    lengths: torch.Tensor
    named: RowPlan
    spans: tuple[torch.Tensor, torch.Tensor]
    index: torch.Tensor
    held: torch.Tensor
    state: torch.Tensor
    newest: torch.Tensor
    whole: PlanBuffers
    room: Room
    strict: bool


class PagesOfRows:
    """Lays steps out.

    Args:
        page: Positions of a page.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        home: int32 ``[num_slots]``, cached positions; None where keys are read as cached.
        num_slots: Slots of the pool.
    """

    def __init__(
        self, page: int, rows: torch.Tensor, cached_at: torch.Tensor | None, num_slots: int
    ) -> None:
        self._page, self._rows, self._cached_at, self._num_slots = page, rows, cached_at, num_slots
        self._starts = torch.arange(-(-rows.shape[1] // page), device=rows.device) * page

    def room(self, batch: int, entries: int, observed: bool) -> Room:
        """For ``batch`` requests with as many entries together, and weights if ``observed``."""
        from sglang_reasoncache.kernels.plan_triton import PlanBuffers

        device = self._rows.device
        plan = PlanBuffers.of(batch, entries, device, positions=True)
        return Room(plan, torch.zeros(entries, device=device) if observed else None)

    def step(
        self,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        whole: PlanBuffers,
        longest: int,
        room: Room,
        *,
        strict: bool,
    ) -> Step:
        """Lay out a step; arguments: see ``DeviceSelection.begin``, and of :class:`Step`."""
        page, batch = self._page, len(requests)
        pages = -(-min(longest, self._rows.shape[1]) // page)
        starts = self._starts[:pages]
        # Copies: SGLang counts lengths up while a forward runs.
        lengths = lengths.long().clamp(max=self._rows.shape[1])
        first = self._rows[:, : pages * page : page][requests.long()]
        held = (first >= 0) & (first < self._num_slots) & (starts < lengths[:, None])
        state, told = held.to(torch.uint8), held
        if self._cached_at is not None:
            cached_at = self._cached_at[first.clamp(0, self._num_slots - 1).long()]
            told = held & (cached_at == starts)
            state = state + (held & ~told).to(torch.uint8)
        named = (first // page).masked_fill_(~told, -1).to(torch.int32).flatten()
        counts = ((lengths + page - 1) // page).clamp(max=pages)
        begin = torch.arange(batch, device=lengths.device) * pages
        spans = begin.to(torch.int32), (begin + counts).to(torch.int32)
        before = counts.cumsum(0) - counts
        index = before[:, None] + torch.arange(pages, device=lengths.device)
        return Step(
            lengths,
            # Its kv_indptr is not read where spans are given.
            RowPlan(spans[0], named, None),
            spans,
            index.clamp_(max=batch * pages - 1),
            held,
            state,
            (lengths - 1).clamp_min(0) // page,
            whole,
            room,
            strict,
        )
