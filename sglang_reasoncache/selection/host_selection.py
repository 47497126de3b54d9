# SPDX-License-Identifier: Apache-2.0
"""Selection in host memory, in PyTorch: shapes follow what the rows hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_reasoncache.kernels.batch import BatchRows
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.selection.page_bounds import PageBounds
from sglang_reasoncache.selection.page_selection import PageSelection


class _Step(NamedTuple):
    """What all layers of a decode step choose from."""

    whole: RowPlan
    row: torch.Tensor  # int64 [entries], of the whole plan's entries
    page: torch.Tensor  # int64 [entries], likewise
    held: torch.Tensor  # bool [rows, pages], which pages the rows have
    newest: torch.Tensor  # int64 [rows], the page that is being filled
    first: torch.Tensor  # int64 [rows, pages], slot at the beginning of each page
    shift: torch.Tensor | None  # int32 [rows, pages], position shift there; None: all are 0
    pages: RowPlan  # its entries are the pages that are held
    weighs: bool
    strict: bool = False


class HostSelection(PageSelection):
    """See :class:`PageSelection`. ``rotation`` rotates queries for pages with a position shift."""

    def __init__(self, *args: Any, rotation: KeyRotation | None = None) -> None:
        super().__init__(*args)
        self._rotation = rotation
        self._host = self._totals
        self._among = torch.empty(0, dtype=torch.bool)
        self._weights: torch.Tensor | None = None

    def _made(self, rows: BatchRows, weighs: bool) -> _Step:
        plan, requests, lengths, longest = rows
        pages = -(-longest // self._page)
        starts = self._starts[:pages]
        used = self._rows[requests.long(), :longest] >= 0
        used &= torch.arange(used.shape[1]) < lengths[:, None]
        row, at = used.nonzero().unbind(1)
        held = used[:, :: self._page]
        first = self._first_slots(requests, pages).long().clamp_min(0)
        shift = None
        if plan.shift is not None and self._cached_at is not None:
            shift = torch.where(held, starts.to(torch.int32) - self._cached_at[first], 0)
        named = RowPlan(_indptr(held.sum(dim=1)), (first // self._page)[held].int(), None)
        newest = (lengths.long() - 1) // self._page
        return _Step(plan, row, at // self._page, held, newest, first, shift, named, weighs)

    def _shares(
        self, step: _Step, bounds: PageBounds, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        query = query.float()
        shares = torch.zeros(step.held.shape).masked_scatter_(
            step.held, bounds.shares(query, step.pages, scale)
        )
        if step.shift is None or self._rotation is None:
            return shares
        # Bounds are those of keys as cached: for a page with a shift the query is rotated back.
        rows = step.shift.any(dim=1).nonzero()[:, 0]
        row, page = step.held[rows].nonzero().unbind(1)
        row = rows[row]
        rotated = self._rotation.rotate(query[row], -step.shift[row, page])
        logits = torch.full((*step.held.shape, query.shape[1]), float("-inf"))
        found = step.first[row, page] // self._page
        logits[row, page] = bounds.largest(rotated, found) * scale
        shares[rows] = logits[rows].softmax(dim=1).sum(dim=2)
        return shares

    def _entries(self, step: _Step, keep: torch.Tensor) -> tuple[RowPlan, torch.Tensor | None]:
        newest = step.newest[:, None]
        left_out = not bool(keep.gather(1, newest).all())
        if left_out:
            keep = keep.scatter(1, newest, True)
        self._among = among = keep[step.row, step.page]
        counts = torch.bincount(step.row[among], minlength=len(keep))
        indices = step.whole.kv_indices[among]
        shift = None if step.whole.shift is None else step.whole.shift[among]
        self._totals += torch.tensor([len(among), len(indices), left_out])
        self._weights = torch.zeros(len(indices)) if step.weighs else None
        return RowPlan(_indptr(counts), indices, shift), self._weights

    def add(self, whole: torch.Tensor) -> None:
        assert self._weights is not None, "of a step with weights"
        whole[self._among] += self._weights


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
