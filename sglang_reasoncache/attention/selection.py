# SPDX-License-Identifier: Apache-2.0
"""Decode reads some pages of each row: which, a selector says in every layer anew.

Pages are the pool's own. Their bounds, the least and largest key of each dim, are noted when
keys are written and belong to the page, whoever names it: ``2 / page`` of the keys' memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from sglang_reasoncache.attention.rotation import KeyRotation
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


class PageBounds:
    """The least and largest keys of each page of a layer.

    Args:
        keys: ``[num_slots, kv_heads, dim]``, of the pool.
        page: Slots of a page.
    """

    def __init__(self, keys: torch.Tensor, page: int) -> None:
        shape = (-(-keys.shape[0] // page), *keys.shape[1:])
        # Not every operator knows fp8; what is written is noted before it is rounded to it.
        dtype = torch.bfloat16 if keys.dtype.itemsize == 1 else keys.dtype
        self._page = page
        self.low = torch.zeros(shape, dtype=dtype, device=keys.device)
        self.high = torch.zeros_like(self.low)

    def note(self, slots: torch.Tensor, keys: torch.Tensor, *, apart: bool = False) -> None:
        """Keys ``[tokens, kv_heads, dim]`` were written to ``slots`` (int ``[tokens]``), each of
        another page if ``apart``."""
        slots = slots.long()
        keys = keys.view(len(slots), *self.low.shape[1:]).to(self.low.dtype)
        pages, places = slots // self._page, slots % self._page
        # A page is filled from its first slot on.
        fresh = pages[places == 0]
        self.low[fresh], self.high[fresh] = float("inf"), float("-inf")
        if apart:
            self._widen(pages, keys)
            return
        for place in range(self._page):
            here = (places == place).nonzero()[:, 0]
            self._widen(pages[here], keys[here])

    def _widen(self, pages: torch.Tensor, keys: torch.Tensor) -> None:
        self.low[pages] = torch.minimum(self.low[pages], keys)
        self.high[pages] = torch.maximum(self.high[pages], keys)


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
        moved: int64 ``[moved, 2]``, row and place of the pages whose keys are used elsewhere.
    """

    slots: torch.Tensor
    used: torch.Tensor
    shift: torch.Tensor | None
    held: torch.Tensor
    newest: torch.Tensor
    moved: torch.Tensor | None


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
        first = min(layers) + selector.whole_layers
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
        if most <= self._selector.budget:
            return
        pages = -(-most // self._page)
        slots = rows[requests.long(), : pages * self._page].long()
        at = torch.arange(slots.shape[1])
        used = (at < lengths[:, None]) & (slots >= 0)
        # A row's end may lie within the last page.
        padding = pages * self._page - slots.shape[1]
        slots = torch.nn.functional.pad(slots.clamp_min(0), (0, padding))
        used = torch.nn.functional.pad(used, (0, padding))
        shift = moved = None
        if home is not None:
            at = torch.arange(slots.shape[1])
            by = torch.where(used, at.to(torch.int32) - home[slots], 0)
            if bool(by.any()):
                shift = by.view(len(slots), pages, self._page)
                moved = shift[..., 0].nonzero()
        slots = slots.view(len(slots), pages, self._page)
        used = used.view(slots.shape)
        self._step = _Step(slots, used, shift, used[..., 0], (lengths - 1) // self._page, moved)

    def plan(self, layer: int, query: torch.Tensor, scale: float) -> Selected | None:
        """What a layer reads; None: all.

        Args:
            query: ``[rows, heads, dim]``.
            scale: Of the logits.
        """
        step = self._step
        if step is None or layer not in self._bounds:
            return None
        keep = self._ask(step, self._bounds[layer], query.float() * scale)
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

    def _ask(self, step: _Step, bounds: PageBounds, query: torch.Tensor) -> torch.Tensor | None:
        try:
            keep = self._selector.keep(
                self._fits(step, bounds, query), step.held, step.newest, self._page
            )
        except Exception:
            self.refusals[SelectionRefusal.POLICY_FAILED.value] += 1
            if not self._failed:
                self._failed = True
                logger.exception(
                    "reasoncache: policy %s failed, further failures count only", self.name
                )
            return None
        if (
            not isinstance(keep, torch.Tensor)
            or keep.dtype != torch.bool
            or keep.shape != step.held.shape
        ):
            self.refusals[SelectionRefusal.MALFORMED.value] += 1
            return None
        newest = step.newest[:, None]
        if not bool(keep.gather(1, newest).all()):
            self.refusals[SelectionRefusal.NEWEST.value] += 1
            keep = keep.scatter(1, newest, True)
        return keep

    def _fits(self, step: _Step, bounds: PageBounds, query: torch.Tensor) -> torch.Tensor:
        pages = step.slots[..., 0] // self._page
        found = self._selector.bounds(query, bounds.low[pages].float(), bounds.high[pages].float())
        if step.moved is not None and len(step.moved) and self._rotation is not None:
            # The bounds are those of keys at home: there the query is turned back.
            row, place = step.moved.unbind(1)
            shift = step.shift[row, place, 0]  # type: ignore[index]
            turned = self._rotation.rotate(query[row], self._rotation.angles(-shift))
            moved = pages[row, place][:, None]
            found[row, place] = self._selector.bounds(
                turned, bounds.low[moved].float(), bounds.high[moved].float()
            )[:, 0]
        return found
