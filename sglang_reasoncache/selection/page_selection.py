# SPDX-License-Identifier: Apache-2.0
"""A decode step reads some pages of each row, selected anew in every layer.

Shapes follow the batch and its longest row, not what rows hold: on a GPU nothing waits for the
device, and a step can be captured in a CUDA graph. Pages are the pool's own. Rows at page sizes
above 1 are shared and evicted by whole pages."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_reasoncache.cache.download import Download
from sglang_reasoncache.kernels.row_plan import BatchRows, RowPlan
from sglang_reasoncache.selection.page_bounds import PageBounds
from sglang_reasoncache.selection.quest import Quest


class _Step(NamedTuple):
    """What all layers of a decode step choose from. Layers read this, not the rows, which may change
    while a forward runs. int64 ``[rows, pages]`` unless stated."""

    whole: Any  # plan of everything: RowPlan, on a GPU PlanBuffers
    held: Tensor  # bool: which pages the rows have
    sizes: Tensor  # positions of each page, 0 of those that the row does not have
    counted: Tensor  # positions of each page, 0 also in rows that are read whole
    newest: Tensor  # [rows, 1]: the page that is being filled
    scored: Tensor  # number in the pool of each page that is used where it is cached, else -1


class PageSelection:
    """Chooses the pages that each layer reads. One per attention backend.

    Bounds are those of keys as cached. Pages that a row uses away from their cached position are
    always read, beside the budget.

    Args:
        layers: Layer -> its keys in the pool, ``[num_slots, kv_heads, dim]``.
        page: Positions of a page, above 1.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        cached_at: int32 ``[num_slots]``, cached positions; None where keys are read as cached.

    Raises:
        MemoryError: there is none for the bounds.
    """

    def __init__(
        self,
        quest: Quest,
        layers: dict[int, Tensor],
        page: int,
        rows: Tensor,
        cached_at: Tensor | None,
    ) -> None:
        self._quest, self._page = quest, page
        self._rows, self._cached_at = rows, cached_at
        self._num_slots = next(iter(layers.values())).shape[0]
        self._starts = torch.arange(-(-rows.shape[1] // page), device=rows.device) * page
        first = min(layers) + quest.whole_layers
        try:
            self._bounds = {
                layer: PageBounds(keys, page) for layer, keys in layers.items() if layer >= first
            }
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        self._on_gpu = any(bounds.on_gpu for bounds in self._bounds.values())
        # Positions held, positions read, of rows beyond the budget.
        self._totals = torch.zeros(2, dtype=torch.int64, device=rows.device)
        self._download = Download(torch.zeros(2, dtype=torch.int64)) if self._on_gpu else None
        self._step: _Step | None = None

    def describe(self) -> dict[str, Any]:
        """For the endpoint. Waits for what is queued on the device."""
        return self._described(self._totals)

    def recent(self) -> dict[str, Any]:
        """As :meth:`describe`; on a GPU of when this was called before, or later, without a wait."""
        if self._download is None:
            return self.describe()
        if self._download.ready():
            self._recent = self._described(*self._download.host)
            # A copy: interpreted, the totals are host memory and go on counting.
            self._download = Download(self._totals.clone())
        return self._recent

    def _described(self, totals: Tensor) -> dict[str, Any]:
        held, read = totals.tolist()
        return {"name": self._quest.name, "positions_held": held, "positions_read": read}

    def update(self, layer: int, slots: Tensor) -> None:
        """Keys were written to ``slots``; see :meth:`PageBounds.update`."""
        if layer in self._bounds:
            self._bounds[layer].update(slots)

    def warm_up(self, whole: Any, queries: dict[int, Tensor]) -> None:
        """Compile kernels. ``whole``: plan of row 0, which is no request's; ``queries``: layer ->
        ``[1, heads, dim]``, layers that would compile the same once."""
        zero = torch.zeros(1, dtype=torch.int64, device=self._rows.device)
        width = self._rows.shape[1]
        step = self._laid_out(BatchRows(whole, zero, zero + width, width))
        for layer, query in queries.items():
            if layer in self._bounds:
                self._step = step
                self.plan(layer, query, 1.0)
                self.update(layer, zero)
        self._totals.zero_()
        self.forget()

    # -- a step -----------------------------------------------------------------

    def begin(self, rows: BatchRows) -> None:
        """A decode step."""
        self._step = self._laid_out(rows) if rows.longest > self._quest.budget else None

    def forget(self) -> None:
        """The next forward reads everything, until a decode step begins."""
        self._step = None

    def _laid_out(self, rows: BatchRows) -> _Step:
        plan, requests, lengths, longest = rows
        page, width = self._page, min(longest, self._rows.shape[1])
        starts = self._starts[: -(-width // page)]
        # Copies: SGLang counts lengths up while a forward runs.
        lengths = lengths.long()[:, None].clamp(max=width)
        first = self._rows[:, : len(starts) * page : page][requests.long()].long()
        held = (first >= 0) & (first < self._num_slots) & (starts < lengths)
        first = first.masked_fill_(~held, 0)
        sizes = (lengths - starts).clamp_(max=page).masked_fill_(~held, 0)
        scored = (first // page).masked_fill_(~held, -1)
        if plan.shift is not None and self._cached_at is not None:
            scored = scored.masked_fill_(starts != self._cached_at[first], -1)
        counted = sizes.masked_fill(lengths <= self._quest.budget, 0)
        newest = (lengths - 1).clamp_min(0) // page
        return _Step(plan, held, sizes, counted, newest, scored)

    # -- a layer ----------------------------------------------------------------

    def plan(self, layer: int, query: Tensor, scale: float) -> RowPlan | None:
        """What a layer reads; None: all.

        Args:
            query: ``[rows, heads, dim]``.
            scale: Of the logits.
        """
        step = self._step
        if step is None or layer not in self._bounds:
            return None
        keep = self._best(step, self._bounds[layer].shares(query, step.scored, scale))
        read = step.sizes.masked_fill(~keep, 0)
        of_counted = step.counted.masked_fill(~keep, 0)
        self._totals += torch.stack((step.counted.sum(), of_counted.sum()))
        return self._entries(step, read)

    def _best(self, step: _Step, shares: Tensor) -> Tensor:
        """bool ``[rows, pages]``: pages to be read."""
        shares = shares.masked_fill(~step.held, -math.inf).scatter(1, step.newest, math.inf)
        count = min(math.ceil(self._quest.budget / self._page), step.held.shape[1])
        best = shares.topk(count, dim=1).indices
        keep = torch.zeros_like(step.held).scatter_(1, best, True)
        return (keep | (step.scored < 0)) & step.held

    def _entries(self, step: _Step, read: Tensor) -> RowPlan:
        """Entries of the whole plan in pages to be read; ``read``: positions of each."""
        kv_indptr, whole = _indptr(read.sum(dim=1)), step.whole
        if self._on_gpu:
            from sglang_reasoncache.kernels import select_triton

            shifted = self._cached_at is not None
            pages = read, step.sizes, self._page
            return RowPlan(kv_indptr, *select_triton.copy_pages(*pages, whole, shifted=shifted))
        among = (read > 0).flatten().repeat_interleave(step.sizes.flatten())
        shift = None if whole.shift is None else whole.shift[among]
        return RowPlan(kv_indptr, whole.kv_indices[among], shift)


def _indptr(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
