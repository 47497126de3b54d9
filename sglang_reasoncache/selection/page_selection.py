# SPDX-License-Identifier: Apache-2.0
"""A decode step reads some pages of each row; a selector says which, in every layer anew.

Pages are the pool's own. Their bounds belong to the page, whichever row names it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from sglang_reasoncache.selection.checked_selector import CheckedSelector, SelectionRefusal
from sglang_reasoncache.selection.page_bounds import PageBounds

if TYPE_CHECKING:
    from sglang_reasoncache.kernels.plan import RowPlan
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers
    from sglang_reasoncache.selection.contract import Selector


class PageSelection:
    """One per attention backend; a subclass for each kind of device.

    Args:
        name: Of the policy, for messages.
        selector: Decides.
        layers: Layer -> its keys in the pool.
        page: Positions of a page, above 1.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        cached_at: int32 ``[num_slots]``, cached positions; None where keys are read as cached.

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
        self._selector = CheckedSelector(name, selector, page)
        self._page, self._rows, self._cached_at = page, rows, cached_at
        self._num_slots = next(iter(layers.values())).shape[0]
        self._starts = torch.arange(-(-rows.shape[1] // page), device=rows.device) * page
        first = min(layers) + self._selector.whole_layers
        try:
            self._bounds = {
                layer: PageBounds(keys, page) for layer, keys in layers.items() if layer >= first
            }
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        # Positions held, positions read, newest pages that the selector left out.
        self._totals = torch.zeros(3, dtype=torch.int64, device=rows.device)
        self._host = torch.zeros(3, dtype=torch.int64, pin_memory=rows.is_cuda)
        self._step: Any = None

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
        refusals = dict(self._selector.refusals)
        if newest:
            refusals[SelectionRefusal.NEWEST.value] = newest
        return {
            "name": self._selector.name,
            "positions_held": held,
            "positions_read": read,
            "refusals": refusals,
        }

    def update(self, layer: int, slots: torch.Tensor) -> None:
        """Keys were written to ``slots``; see :meth:`PageBounds.update`."""
        if layer in self._bounds:
            self._bounds[layer].update(slots)

    def begin(
        self,
        plan: RowPlan | PlanBuffers,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        weighs: bool,
    ) -> None:
        """A decode step, outside of CUDA graphs.

        Args:
            plan: Of its rows; on a GPU with ``positions``.
            requests, lengths: int ``[batch]``, rows and their positions, new ones included.
            longest: Upper bound on ``lengths``.
            weighs: Weights of what is read are needed.
        """
        self._step = None
        if longest > self._selector.budget:
            self._step = self._made(plan, requests, lengths, longest, weighs)

    def forget(self) -> None:
        """The next forward reads everything, until a decode step begins."""
        self._step = None

    def plan(
        self, layer: int, query: torch.Tensor, scale: float
    ) -> tuple[RowPlan, torch.Tensor | None] | None:
        """What a layer reads, and zeros that its weights are added to; None: all.

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
        keep = self._selector.pages(
            shares, step.held, step.newest, strict=step.strict, during=self._during(shares.device)
        )
        return None if keep is None else self._entries(step, keep)

    def add(self, whole: torch.Tensor) -> None:
        """Add the weights of what :meth:`plan` gave last to those of the whole plan's entries."""
        raise NotImplementedError

    def _during(self, device: torch.device) -> AbstractContextManager[Any] | None:
        """Entered while the selector decides."""
        return None

    def _first_slots(self, requests: torch.Tensor, pages: int) -> torch.Tensor:
        """int ``[rows, pages]``, the slot at the beginning of each page."""
        return self._rows[:, : pages * self._page : self._page][requests.long()]

    def _made(
        self,
        plan: Any,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
        weighs: bool,
    ) -> Any:
        """What all layers of a step choose from: has ``held``, ``newest`` and ``strict``."""
        raise NotImplementedError

    def _shares(
        self, step: Any, bounds: PageBounds, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """fp32 ``[rows, pages]``, see ``Selector.keep``."""
        raise NotImplementedError

    def _entries(self, step: Any, keep: torch.Tensor) -> tuple[RowPlan, torch.Tensor | None]:
        raise NotImplementedError
