# SPDX-License-Identifier: Apache-2.0
"""Decode reads some pages of each row: which, a selector says in every layer anew.

Pages are the pool's own. Their bounds, the least and largest key of each dim, are noted when
keys are written and belong to the page, whoever names it.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from sglang_reasoncache.attention.page_bounds import PageBounds
from sglang_reasoncache.attention.rotation import KeyRotation
from sglang_reasoncache.config import flag_of
from sglang_reasoncache.kernels.plan import RowPlan
from sglang_reasoncache.policies.contract import Selector

logger = logging.getLogger(__name__)


class SelectionRefusal(Enum):
    """Why a selector's answer was not used as it is; values are metric labels."""

    MALFORMED = "malformed"
    """No bool tensor of the pages' shape: everything was read."""
    NEWEST = "newest"
    """The page that is being filled was left out: it was read."""
    POLICY_FAILED = "policy_failed"
    """The policy raised an exception: everything was read."""


#: How :class:`Selector` says what it reads whole, and the least of each.
_COUNTS = {"budget": 1, "whole_layers": 0}


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
        self.name = name
        self._selector = selector
        self._page = page
        self._rotation = rotation
        # Asked once: what another package's selector says later could not be caught everywhere.
        self._budget, whole_layers = limits_of(name, selector)
        first = min(layers) + whole_layers
        self._bounds = {
            layer: PageBounds(keys, page) for layer, keys in layers.items() if layer >= first
        }
        self._step: _Step | None = None
        self._failed = False
        self.held = self.read = 0
        self.refusals: Counter[str] = Counter()

    def describe(self) -> dict[str, Any]:
        """For the endpoint."""
        return {
            "name": self.name,
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
        home: torch.Tensor | None,
    ) -> None:
        """A decode step over ``rows[requests, :lengths]``, see ``plan_rows``; of no length: another
        forward."""
        self._step = None
        most = int(lengths.max()) if len(lengths) else 0
        if most <= self._budget:
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
        if home is not None:
            at = torch.arange(slots.shape[1])
            by = torch.where(used, at.to(torch.int32) - home[slots], 0)
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
        try:
            # Copies: later layers read the same, whatever a selector does to its own.
            keep = self._selector.keep(shares, step.held.clone(), step.newest.clone(), self._page)
        except Exception:
            self.refusals[SelectionRefusal.POLICY_FAILED.value] += 1
            if not self._failed:
                self._failed = True
                logger.exception(
                    "reasoncache: policy %s failed, further failures count only", self.name
                )
            return None
        if (
            type(keep) is not torch.Tensor
            or keep.dtype != torch.bool
            or keep.shape != step.held.shape
            or keep.device != step.held.device
            or keep.layout != torch.strided
        ):
            self.refusals[SelectionRefusal.MALFORMED.value] += 1
            return None
        newest = step.newest[:, None]
        if not bool(keep.gather(1, newest).all()):
            self.refusals[SelectionRefusal.NEWEST.value] += 1
            keep = keep.scatter(1, newest, True)
        return keep

    def _shares(
        self, step: _Step, bounds: PageBounds, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        shares = torch.zeros(step.held.shape).masked_scatter_(
            step.held, bounds.shares(query, step.pages, scale)
        )
        if step.shift is None or self._rotation is None:
            return shares
        # Bounds are those of keys at home: for a page used elsewhere the query is turned back.
        rows = step.shift[..., 0].any(dim=1).nonzero()[:, 0]
        row, place = step.held[rows].nonzero().unbind(1)
        row = rows[row]
        turned = self._rotation.rotate(
            query[row], self._rotation.angles(-step.shift[row, place, 0])
        )
        pages = step.slots[row, place, 0] // self._page
        logits = torch.full((*step.held.shape, query.shape[1]), float("-inf"))
        logits[row, place] = bounds.largest(turned, pages) * scale
        shares[rows] = logits[rows].softmax(dim=1).sum(dim=2)
        return shares


def limits_of(name: str, selector: Selector) -> tuple[int, int]:
    """``budget`` and ``whole_layers`` of a selector.

    Raises:
        ValueError: one of them is no such number.
    """
    budget, whole_layers = (_count(name, selector, key) for key in _COUNTS)
    return budget, whole_layers


def _count(name: str, selector: Selector, key: str) -> int:
    try:
        found = getattr(selector, key)
    except Exception as error:
        found = error
    if type(found) is not int or found < _COUNTS[key]:
        raise ValueError(
            f"{flag_of('policy')} {name}: {key} of a selector must be an integer of at least "
            f"{_COUNTS[key]}, got {found!r}"
        )
    return found
