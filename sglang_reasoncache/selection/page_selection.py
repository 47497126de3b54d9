# SPDX-License-Identifier: Apache-2.0
"""Decode reads some pages of each row: which, a selector says in every layer anew.

Pages are the pool's own. Their bounds, the least and largest key of each dim, are noted when
keys are written and belong to the page, whoever names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sglang_reasoncache.eviction.policies.contract import Selector
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.selection.checked_selector import CheckedSelector, SelectionRefusal
from sglang_reasoncache.selection.page_bounds import PageBounds


class Selected(NamedTuple):
    """What a layer reads in a step.

    Attributes:
        rows: The entries.
        among: bool, which they are of the entries that all layers could read.
    """

    rows: RowPlan
    among: torch.Tensor


@dataclass
class _Step:
    """What all layers of a decode step choose from.

    Attributes:
        slots: int64 ``[rows, pages, page]``; meaningless where not ``used``.
        used: bool, likewise, which of them hold a position of the row.
        shift: int32, likewise; None where all are 0.
        held: bool ``[rows, pages]``, which pages the rows have.
        newest: int64 ``[rows]``, the page that is being filled.
        pages: Entries are the pages that are held.
    """

    slots: torch.Tensor
    used: torch.Tensor
    shift: torch.Tensor | None
    held: torch.Tensor
    newest: torch.Tensor
    pages: RowPlan


class PageSelection:
    """One per attention backend.

    Args:
        name: Of the policy, for messages.
        selector: Decides.
        layers: Layer -> its keys in the pool.
        page: Positions of a page, above 1.
        rotation: Of moved keys; None where keys are read as cached.

    Attributes:
        held, read: Positions of the rows that were selected from, and those read of them; a
            number for every layer.
        refusals: Of :class:`SelectionRefusal`, by value.

    Raises:
        ValueError: ``budget`` or ``whole_layers`` of the selector is no such number.
    """

    def __init__(
        self,
        name: str,
        selector: Selector,
        layers: dict[int, torch.Tensor],
        page: int,
        rotation: KeyRotation | None,
    ) -> None:
        self._asked = CheckedSelector(name, selector, page)
        self._page = page
        self._rotation = rotation
        first = min(layers) + self._asked.whole_layers
        self._bounds = {
            layer: PageBounds(keys, page) for layer, keys in layers.items() if layer >= first
        }
        self._step: _Step | None = None
        self.held = self.read = 0
        self.refusals = self._asked.refusals

    def describe(self) -> dict[str, Any]:
        """For the endpoint."""
        return {
            "name": self._asked.name,
            "positions_held": self.held,
            "positions_read": self.read,
            "refusals": dict(self.refusals),
        }

    def recent(self) -> dict[str, Any]:
        """The same, without a wait."""
        return self.describe()

    def note(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, *, apart: bool = False
    ) -> None:
        """Keys were written; see :meth:`PageBounds.note`."""
        if layer in self._bounds:
            self._bounds[layer].note(slots, keys, apart=apart)

    def begin(
        self,
        rows: torch.Tensor,
        requests: torch.Tensor,
        lengths: torch.Tensor,
        cached_at: torch.Tensor | None,
    ) -> None:
        """A decode step over ``rows[requests, :lengths]``, see ``plan_rows``; of no length: another
        forward."""
        self._step = None
        most = int(lengths.max()) if len(lengths) else 0
        if most <= self._asked.budget:
            return
        pages = -(-most // self._page)
        slots = rows[requests.long(), : pages * self._page].long()
        at = torch.arange(slots.shape[1])
        used = (at < lengths[:, None]) & (slots >= 0)
        # A row's end may lie within the last page.
        padding = pages * self._page - slots.shape[1]
        slots = torch.nn.functional.pad(slots.clamp_min(0), (0, padding))
        used = torch.nn.functional.pad(used, (0, padding))
        shift = None
        if cached_at is not None:
            at = torch.arange(slots.shape[1])
            by = torch.where(used, at.to(torch.int32) - cached_at[slots], 0)
            if bool(by.any()):
                shift = by.view(len(slots), pages, self._page)
        slots = slots.view(len(slots), pages, self._page)
        used = used.view(slots.shape)
        held = used[..., 0]
        indptr = torch.nn.functional.pad(held.sum(dim=1).cumsum(0), (1, 0)).to(torch.int32)
        named = (slots[..., 0] // self._page)[held].to(torch.int32)
        newest = (lengths.long() - 1) // self._page
        self._step = _Step(slots, used, shift, held, newest, RowPlan(indptr, named, None))

    def plan(self, layer: int, query: torch.Tensor, scale: float) -> Selected | None:
        """What a layer reads; None: all.

        Args:
            query: ``[rows, heads, dim]``.
            scale: Of the logits.
        """
        step = self._step
        if step is None or layer not in self._bounds:
            return None
        keep = self._ask(step, self._shares(step, self._bounds[layer], query.float(), scale))
        if keep is None:
            return None
        chosen = step.used & keep[..., None]
        counts = chosen.sum(dim=(1, 2))
        indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        indices = step.slots[chosen].to(torch.int32)
        shift = None if step.shift is None else step.shift[chosen]
        among = chosen[step.used]
        self.held += len(among)
        self.read += len(indices)
        return Selected(RowPlan(indptr, indices, shift), among)

    def _ask(self, step: _Step, shares: torch.Tensor) -> torch.Tensor | None:
        keep = self._asked.pages(shares, step.held, step.newest)
        newest = step.newest[:, None]
        if keep is None or bool(keep.gather(1, newest).all()):
            return keep
        self.refusals[SelectionRefusal.NEWEST.value] += 1
        return keep.scatter(1, newest, True)

    def _shares(
        self, step: _Step, bounds: PageBounds, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        shares = torch.zeros(step.held.shape).masked_scatter_(
            step.held, bounds.shares(query, step.pages, scale)
        )
        if step.shift is None or self._rotation is None:
            return shares
        # Bounds are those of keys at home: for a page used elsewhere the query is rotated back.
        rows = step.shift[..., 0].any(dim=1).nonzero()[:, 0]
        row, place = step.held[rows].nonzero().unbind(1)
        row = rows[row]
        rotated = self._rotation.rotate(
            query[row], self._rotation.angles(-step.shift[row, place, 0])
        )
        pages = step.slots[row, place, 0] // self._page
        logits = torch.full((*step.held.shape, query.shape[1]), float("-inf"))
        logits[row, place] = bounds.largest(rotated, pages) * scale
        shares[rows] = logits[rows].softmax(dim=1).sum(dim=2)
        return shares
