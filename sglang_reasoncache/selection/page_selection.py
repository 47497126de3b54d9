# SPDX-License-Identifier: Apache-2.0
"""A decode step reads some pages of each row; a selector says which, in every layer anew.

Pages are the pool's own. Their bounds belong to the page, whichever row names it. What the
selector returns is checked before anything is read by it."""

from __future__ import annotations

import logging
from collections import Counter
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_reasoncache.arguments import flag_of
from sglang_reasoncache.kernels.rotation import KeyRotation
from sglang_reasoncache.kernels.row_plan import BatchRows, RowPlan
from sglang_reasoncache.selection.contract import Selector
from sglang_reasoncache.selection.page_bounds import PageBounds

logger = logging.getLogger(__name__)


class SelectionRefusal(Enum):
    """Why a selector's answer was not used as it is; values are metric labels."""

    MALFORMED = "malformed"  # no bool tensor of the pages' shape: everything was read
    NEWEST = "newest"  # the page that is being filled was left out: it was read
    POLICY_FAILED = "policy_failed"  # the policy raised an exception: everything was read


class _Step(NamedTuple):
    """What all layers of a decode step choose from."""

    whole: RowPlan
    row: Tensor  # int64 [entries], of the whole plan's entries
    page: Tensor  # int64 [entries], likewise
    held: Tensor  # bool [rows, pages], which pages the rows have
    newest: Tensor  # int64 [rows], the page that is being filled
    first: Tensor  # int64 [rows, pages], slot at the beginning of each page
    shift: Tensor | None  # int32 [rows, pages], position shift there; None: all are 0
    pages: RowPlan  # its entries are the pages that are held
    weighs: bool
    strict: bool = False  # a selector's error ends the start


class PageSelection:
    """One per attention backend, here in host memory, where shapes follow what the rows hold.

    Args:
        name: Of the policy, for messages.
        selector: Decides.
        layers: Layer -> its keys in the pool.
        page: Positions of a page, above 1.
        rows: ``req_to_token``, int32 ``[max_requests, max_context]``.
        cached_at: int32 ``[num_slots]``, cached positions; None where keys are read as cached.
        rotation: Rotates queries for pages with a position shift.

    Raises:
        ValueError: ``budget`` or ``whole_layers`` of the selector is no such number.
        MemoryError: there is none for the bounds.
    """

    def __init__(
        self,
        name: str,
        selector: Selector,
        layers: dict[int, Tensor],
        page: int,
        rows: Tensor,
        cached_at: Tensor | None,
        rotation: KeyRotation | None = None,
    ) -> None:
        self._name, self._flag = name, f"{flag_of('policy')} {name}"
        self._selector, self._page, self._rows, self._cached_at = selector, page, rows, cached_at
        self._rotation = rotation
        # Read once: errors of another package's selector cannot be caught everywhere.
        self._budget = self._count("budget", 1)
        first = min(layers) + self._count("whole_layers", 0)
        self._failed = False
        self._refusals: Counter[str] = Counter()
        self._num_slots = next(iter(layers.values())).shape[0]
        self._starts = torch.arange(-(-rows.shape[1] // page), device=rows.device) * page
        try:
            self._bounds = {
                layer: PageBounds(keys, page) for layer, keys in layers.items() if layer >= first
            }
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        # Positions held, positions read, newest pages that the selector left out.
        self._totals = torch.zeros(3, dtype=torch.int64, device=rows.device)
        self._step: Any = None
        # Of the layer planned last: which entries of the whole plan it reads, their weights.
        self._among = torch.empty(0, dtype=torch.bool)
        self._weights: Tensor | None = None

    def _count(self, key: str, least: int) -> int:
        try:
            found = getattr(self._selector, key)
        except Exception as error:
            found = error
        if type(found) is not int or found < least:
            raise ValueError(
                f"{self._flag}: {key} of a selector must be an integer of at least {least}, "
                f"got {found!r}"
            )
        return found

    def describe(self) -> dict[str, Any]:
        """For the endpoint. Waits for what is queued on the device."""
        return self._described(self._totals)

    def recent(self) -> dict[str, Any]:
        """As :meth:`describe`; on a GPU of when this was called before, or later, without a wait."""
        return self.describe()

    def _described(self, totals: Tensor) -> dict[str, Any]:
        held, read, newest = totals.tolist()
        refusals = dict(self._refusals)
        if newest:
            refusals[SelectionRefusal.NEWEST.value] = newest
        counts = {"positions_held": held, "positions_read": read}
        return {"name": self._name, **counts, "refusals": refusals}

    def update(self, layer: int, slots: Tensor) -> None:
        """Keys were written to ``slots``; see :meth:`PageBounds.update`."""
        if layer in self._bounds:
            self._bounds[layer].update(slots)

    # -- a step -----------------------------------------------------------------

    def begin(self, rows: BatchRows, weighs: bool) -> None:
        """A decode step, outside of CUDA graphs; ``weighs``: weights of what is read are needed."""
        self._step = self._made(rows, weighs) if rows.longest > self._budget else None

    def forget(self) -> None:
        """The next forward reads everything, until a decode step begins."""
        self._step = None

    def _made(self, rows: BatchRows, weighs: bool) -> Any:
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

    def _first_slots(self, requests: Tensor, pages: int) -> Tensor:
        """int ``[rows, pages]``, the slot at the beginning of each page."""
        return self._rows[:, : pages * self._page : self._page][requests.long()]

    # -- a layer ----------------------------------------------------------------

    def plan(self, layer: int, query: Tensor, scale: float) -> tuple[RowPlan, Tensor | None] | None:
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
        keep = self._kept(step, self._shares(step, self._bounds[layer], query, scale))
        return None if keep is None else self._entries(step, keep)

    def _shares(self, step: Any, bounds: PageBounds, query: Tensor, scale: float) -> Tensor:
        """fp32 ``[rows, pages]``, see ``Selector.keep``."""
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

    def _kept(self, step: Any, shares: Tensor) -> Tensor | None:
        """bool ``[rows, pages]``, what the selector keeps; None: it failed or gave nonsense."""
        held, failure = step.held, None
        try:
            # Copies: later layers read the same, whatever a selector does to its own.
            keep = self._selector.keep(shares, held.clone(), step.newest.clone(), self._page)
        except Exception as error:
            failure, refusal = error, SelectionRefusal.POLICY_FAILED
            problem = f"failed on {shares.device}: {type(error).__name__}: {error}"
        else:
            if (
                type(keep) is Tensor
                and (keep.dtype, keep.shape) == (torch.bool, held.shape)
                and (keep.device, keep.layout) == (held.device, torch.strided)
            ):
                return keep
            refusal = SelectionRefusal.MALFORMED
            problem = f"must give a plain bool tensor {list(held.shape)} on {held.device}, got "
            problem += _named(keep)
        if step.strict:
            raise ValueError(f"{self._flag}: keep of a selector {problem}") from failure
        self._refusals[refusal.value] += 1
        if failure is not None and not self._failed:
            self._failed = True
            told = "reasoncache: policy %s failed, further failures count only"
            logger.error(told, self._name, exc_info=failure)
        return None

    def _entries(self, step: Any, keep: Tensor) -> tuple[RowPlan, Tensor | None]:
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

    def add(self, whole: Tensor) -> None:
        """Add the weights of what :meth:`plan` gave last to those of the whole plan's entries."""
        assert self._weights is not None, "of a step with weights"
        whole[self._among] += self._weights


def _indptr(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def _named(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)} on {value.device}"
    return type(value).__name__
