# SPDX-License-Identifier: Apache-2.0
"""As :mod:`~sglang_reasoncache.selection.page_selection`, on a device that nobody waits for.

Shapes depend on the batch and on how long rows may be, so a step can be captured in a CUDA
graph. What differs from the CPU: a page that a row uses elsewhere than at home is always read
(its bounds are those at home), and rows within the budget neither ask nor count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.selection import waits
from sglang_reasoncache.selection.checked_selector import CheckedSelector, SelectionRefusal
from sglang_reasoncache.selection.page_bounds import PageBounds
from sglang_reasoncache.selection.selection_step import PagesOfRows, Room, Step

if TYPE_CHECKING:
    from sglang_reasoncache.eviction.policies.contract import Selector
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers


class DeviceSelection:
    """One per attention backend.

    Args:
        name: Of the policy, for messages.
        selector: Decides.
        layers: Layer -> its keys in the pool.
        page: Positions of a page, above 1.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        home: int32 ``[num_slots]``, cached positions; None where keys are read as cached.

    Raises:
        ValueError: ``budget`` or ``whole_layers`` of the selector is no such number.
        MemoryError: there is none for the bounds.
    """

    def __init__(
        self,
        name: str,
        selector: Selector,
        layers: dict[int, torch.Tensor],
        page: int,
        rows: torch.Tensor,
        cached_at: torch.Tensor | None,
    ) -> None:
        self._asked = CheckedSelector(name, selector, page)
        self._page, self._rows, self._cached_at = page, rows, cached_at
        first = min(layers) + self._asked.whole_layers
        self._keys = {layer: keys for layer, keys in layers.items() if layer >= first}
        try:
            self._bounds = {layer: PageBounds(keys, page) for layer, keys in self._keys.items()}
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        num_slots = next(iter(layers.values())).shape[0]
        self._pages = PagesOfRows(page, rows, cached_at, num_slots)
        # Held, read, newest pages that were not asked for.
        self._totals = torch.zeros(3, dtype=torch.int64, device=rows.device)
        self._host = torch.zeros(3, dtype=torch.int64, pin_memory=rows.is_cuda)
        self._step: Step | None = None
        self._graph_room: Room | None = None
        # Graphs captured before larger ones were asked for still write here.
        self._outgrown: list[Room] = []
        self._trying = False

    def describe(self) -> dict[str, Any]:
        """For the endpoint. Waits for what is queued on the device."""
        return self._described(self._totals)

    def recent(self) -> dict[str, Any]:
        """As :meth:`describe`, of when this was called before, or later; without a wait."""
        described = self._described(self._host)
        self._host.copy_(self._totals, non_blocking=True)
        return described

    def _described(self, totals: torch.Tensor) -> dict[str, Any]:
        held, read, newest = totals.tolist()
        refusals = dict(self._asked.refusals)
        if newest:
            refusals[SelectionRefusal.NEWEST.value] = newest
        return {
            "name": self._asked.name,
            "positions_held": held,
            "positions_read": read,
            "refusals": refusals,
        }

    def note(self, layer: int, slots: torch.Tensor) -> None:
        """Keys were written to ``slots`` (int ``[tokens]``), those of a page side by side."""
        if layer in self._bounds:
            from sglang_reasoncache.kernels import bounds_triton

            bounds_triton.note(self._keys[layer], slots, self._bounds[layer].ends, self._page)

    # -- a step -----------------------------------------------------------------

    def allocate_graphs(self, batch: int, *, observed: bool) -> None:
        """Have room for the graphs of up to ``batch`` requests."""
        if self._graph_room is not None:
            self._outgrown.append(self._graph_room)
        self._graph_room = self._pages.room(batch, batch * self._rows.shape[1], observed)

    def begin(
        self,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        whole: PlanBuffers,
        *,
        longest: int,
        observed: bool,
    ) -> None:
        """A decode step outside of graphs.

        Args:
            requests, lengths: int ``[batch]``, rows and their positions, new ones included.
            whole: Their plan, with ``positions``.
            longest: Upper bound on ``lengths``.
            observed: Weights of what is read are asked for.
        """
        self._step = None
        if longest <= self._asked.budget:
            return
        room = self._pages.room(len(requests), len(whole.kv_indices), observed)
        self._step = self._pages.step(requests, lengths, whole, longest, room, strict=False)

    def begin_graph(
        self, requests: torch.Tensor, lengths: torch.Tensor, whole: PlanBuffers
    ) -> None:
        """As :meth:`begin`, captured in a CUDA graph, for rows of any length."""
        assert self._graph_room is not None, "allocate_graphs comes first"
        width = self._rows.shape[1]
        room = self._graph_room
        self._step = self._pages.step(requests, lengths, whole, width, room, strict=True)

    def forget(self) -> None:
        """The next forward is no decode step of ours until one begins."""
        self._step = None

    # -- a layer ----------------------------------------------------------------

    def plan(
        self, layer: int, query: torch.Tensor, scale: float
    ) -> tuple[RowPlan, torch.Tensor | None] | None:
        """What a layer reads, and weights for it to be added to; None: all.

        Args:
            query: ``[rows, heads, dim]``.
            scale: Of the logits.

        Raises:
            ValueError: the selector failed or gave nonsense while a graph was captured.
        """
        step = self._step
        if step is None or layer not in self._bounds:
            return None
        shares = self._shares(step, self._bounds[layer], query, scale)
        asked = self._asked.pages(
            shares,
            step.held,
            step.newest,
            strict=step.strict,
            during=waits.refused(shares.device) if self._trying else None,
        )
        if asked is None:
            return None
        from sglang_reasoncache.kernels import select_triton

        keep = torch.empty_like(step.state)
        select_triton.settle(
            asked.contiguous(),
            step.state,
            step.lengths,
            keep,
            self._totals,
            budget=self._asked.budget,
            page=self._page,
        )
        chosen = step.room.plan
        select_triton.select_into(chosen, step.whole, keep, self._page)
        rows = chosen.plan_of(len(keep))
        return rows if self._cached_at is not None else rows._replace(shift=None), step.room.weights

    def add(self, whole: torch.Tensor) -> None:
        """Weights of what :meth:`plan` gave last go to those of the whole plan's entries."""
        from sglang_reasoncache.kernels import select_triton

        step = self._step
        assert step is not None and step.room.weights is not None, "of a step with weights"
        select_triton.add(step.room.weights, step.room.plan, len(step.state), whole)

    def _shares(
        self, step: Step, bounds: PageBounds, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        found = bounds.shares(
            query, step.named, scale, spans=step.spans, longest=step.held.shape[1]
        )
        return found[step.index].masked_fill_(~step.held, 0.0)

    # -- at the start -------------------------------------------------------------

    def try_out(self, whole: PlanBuffers, queries: dict[int, torch.Tensor]) -> None:
        """Ask the selector once a layer, about row 0, which is no request's, and compile.

        Args:
            whole: A plan of that row, with ``positions``.
            queries: Layer -> ``[1, heads, dim]``; layers that would compile the same once.

        Raises:
            ValueError: it fails, gives nonsense, or waits for the device.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=self._rows.device)
        width = self._rows.shape[1]
        room = self._pages.room(1, len(whole.kv_indices), observed=True)
        step = self._pages.step(zero, zero + width, whole, width, room, strict=True)
        self._trying = True
        try:
            for layer, query in queries.items():
                if layer in self._bounds:
                    self._step = step
                    self.plan(layer, query, 1.0)
                    self.add(torch.zeros(len(whole.kv_indices), device=zero.device))
                    self.note(layer, zero)
        finally:
            self._trying, self._step = False, None
            self._totals.zero_()
