# SPDX-License-Identifier: Apache-2.0
"""Selection on a GPU: nothing waits for the device, and a step can be captured in a CUDA graph.

Unlike in host memory, a page that a row uses with a position shift is always read (its bounds
are those of keys as cached), and rows within the budget do not count."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_reasoncache.cache.download import Download
from sglang_reasoncache.kernels import select_triton
from sglang_reasoncache.kernels.plan_triton import PlanBuffers
from sglang_reasoncache.kernels.row_plan import BatchRows, RowPlan
from sglang_reasoncache.selection.page_bounds import PageBounds
from sglang_reasoncache.selection.page_selection import PageSelection

_INDEX = torch.ops.aten.index.Tensor
_INDEXING = (
    _INDEX,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._index_put_impl_.default,
)


class WouldWait(RuntimeError):
    """The host would have to know what is in a tensor; the message names the operator."""


class _Refusing(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Whether the host knows the shape all the same.
        sized = func is _INDEX or kwargs.get("output_size") is not None
        waits = torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags and not sized
        )
        masks = (torch.bool, torch.uint8)
        if func in _INDEXING:
            waits |= any(index is not None and index.dtype in masks for index in args[1])
        if waits:
            raise WouldWait(f"{func} waits for the device")
        return func(*args, **kwargs)


@contextlib.contextmanager
def refused(device: torch.device) -> Iterator[None]:
    """In here, what would wait for ``device`` raises.

    Operators whose result's shape or value the host needs do so on every device. On CUDA
    copies between host and device do too.

    Raises:
        WouldWait: by an operator of the first kind; PyTorch's own RuntimeError by the others.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
            torch.cuda.set_sync_debug_mode("error")
        stack.enter_context(_Refusing())
        yield


class SelectionBuffers(NamedTuple):
    """Where the selected entries of a layer go, layer after layer."""

    plan: PlanBuffers  # its positions are where entries are in the whole plan
    weights: torch.Tensor | None  # fp32, of these entries, zeros between layers; None: not needed


class _Step(NamedTuple):
    """What all layers of a decode step choose from; they never read rows."""

    lengths: torch.Tensor  # int64 [rows]
    pages: RowPlan  # entries are pages, row after row; below 0 where bounds say nothing
    spans: tuple[torch.Tensor, torch.Tensor]  # int32 [rows] each, entries within a row's length
    share_index: torch.Tensor  # int64 [rows, pages], where a page's share is among theirs
    held: torch.Tensor  # bool [rows, pages], which pages the rows have
    state: torch.Tensor  # uint8, likewise, see select_triton
    newest: torch.Tensor  # int64 [rows], the page that is being filled
    whole: PlanBuffers  # the plan that is selected from
    buffers: SelectionBuffers
    strict: bool


class DeviceSelection(PageSelection):
    """See :class:`PageSelection`."""

    # Graphs captured before larger buffers were allocated still write to the earlier ones.
    _graph_buffers: tuple[SelectionBuffers, ...] = ()
    _trying = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._download = Download(torch.zeros(3, dtype=torch.int64))

    def recent(self) -> dict[str, Any]:
        if self._download.ready():
            self._recent = self._described(*self._download.host)
            # A copy: interpreted, the totals are host memory and go on counting.
            self._download = Download(self._totals.clone())
        return self._recent

    def allocate_graphs(self, batch: int, *, weighs: bool) -> None:
        """Have capacity for the graphs of up to ``batch`` requests."""
        made = self._buffers(batch, batch * self._rows.shape[1], weighs)
        self._graph_buffers = (made, *self._graph_buffers)

    def begin_graph(self, rows: BatchRows) -> None:
        """As :meth:`begin`, captured in a CUDA graph after :meth:`allocate_graphs`, for rows of
        any length."""
        self._step = self._laid_out(rows, self._graph_buffers[0], strict=True)

    def _made(self, rows: BatchRows, weighs: bool) -> _Step:
        buffers = self._buffers(len(rows.requests), len(rows.plan.kv_indices), weighs)
        return self._laid_out(rows, buffers, strict=False)

    def _buffers(self, batch: int, entries: int, weighs: bool) -> SelectionBuffers:
        device = self._rows.device
        plan = PlanBuffers.of(batch, entries, device, positions=True)
        return SelectionBuffers(plan, torch.zeros(entries, device=device) if weighs else None)

    def _laid_out(self, rows: BatchRows, buffers: SelectionBuffers, *, strict: bool) -> _Step:
        plan, requests, lengths, longest = rows
        page, batch = self._page, len(requests)
        pages = -(-min(longest, self._rows.shape[1]) // page)
        starts = self._starts[:pages]
        # Copies: SGLang counts lengths up while a forward runs.
        lengths = lengths.long().clamp(max=self._rows.shape[1])
        first = self._first_slots(requests, pages)
        held = (first >= 0) & (first < self._num_slots) & (starts < lengths[:, None])
        state, known = held.to(torch.uint8), held
        if self._cached_at is not None:
            cached_at = self._cached_at[first.clamp(0, self._num_slots - 1).long()]
            known = held & (cached_at == starts)
            state = state + (held & ~known).to(torch.uint8)
        named = (first // page).masked_fill_(~known, -1).to(torch.int32).flatten()
        counts = ((lengths + page - 1) // page).clamp(max=pages)
        begin = torch.arange(batch, device=lengths.device) * pages
        spans = begin.to(torch.int32), (begin + counts).to(torch.int32)
        before = counts.cumsum(0) - counts
        index = before[:, None] + torch.arange(pages, device=lengths.device)
        return _Step(
            lengths=lengths,
            # Its kv_indptr is not read where spans are given.
            pages=RowPlan(spans[0], named, None),
            spans=spans,
            share_index=index.clamp_(max=batch * pages - 1),
            held=held,
            state=state,
            newest=(lengths - 1).clamp_min(0) // page,
            whole=plan,
            buffers=buffers,
            strict=strict,
        )

    def _shares(
        self, step: _Step, bounds: PageBounds, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        pages = step.held.shape[1]
        found = bounds.shares(query, step.pages, scale, spans=step.spans, longest=pages)
        return found[step.share_index].masked_fill_(~step.held, 0.0)

    def _kept(self, step: _Step, shares: torch.Tensor) -> torch.Tensor | None:
        with refused(shares.device) if self._trying else contextlib.nullcontext():
            return super()._kept(step, shares)

    def _entries(self, step: _Step, keep: torch.Tensor) -> tuple[RowPlan, torch.Tensor | None]:
        settled = torch.empty_like(step.state)
        tensors = keep.contiguous(), step.state, step.lengths, settled, self._totals
        select_triton.settle(*tensors, budget=self._budget, page=self._page)
        select_triton.select_into(step.buffers.plan, step.whole, settled, self._page)
        rows = step.buffers.plan.plan_of(len(settled))
        if self._cached_at is None:
            rows = rows._replace(shift=None)
        return rows, step.buffers.weights

    def add(self, whole: torch.Tensor) -> None:
        plan, weights = self._step.buffers
        assert weights is not None, "of a step with weights"
        select_triton.add(weights, plan, len(self._step.state), whole)

    def try_out(self, plan: PlanBuffers, queries: dict[int, torch.Tensor]) -> None:
        """At the start, run the selector once a layer on row 0, which is no request's, and compile.

        Args:
            plan: Of that row, with ``positions``.
            queries: Layer -> ``[1, heads, dim]``; layers that would compile the same once.

        Raises:
            ValueError: it fails, gives nonsense, or waits for the device.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=self._rows.device)
        width, entries = self._rows.shape[1], len(plan.kv_indices)
        buffers = self._buffers(1, entries, weighs=True)
        step = self._laid_out(BatchRows(plan, zero, zero + width, width), buffers, strict=True)
        self._trying = True
        try:
            for layer, query in queries.items():
                if layer in self._bounds:
                    self._step = step
                    self.plan(layer, query, 1.0)
                    self.add(torch.zeros(entries, device=zero.device))
                    self.update(layer, zero)
        finally:
            self._trying, self._step = False, None
            self._totals.zero_()
