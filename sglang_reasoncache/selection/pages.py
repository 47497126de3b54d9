# SPDX-License-Identifier: Apache-2.0
"""Chooses the pages of each row that a layer of a decode step reads, by bounds of the pages' keys (Quest).

All heads of a layer read the same pages, because a plan has one list of entries for a request. Where the paper
takes the best pages of each head, each head here spreads a weight of 1 over the pages, by a softmax of its
largest possible logits, and the pages with the largest sums are read.

Shapes follow the batch and its longest row, not what rows hold: on a GPU nothing waits for the device, and a
step can be captured in a CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_reasoncache.device.download import Download
from sglang_reasoncache.device.upload import upload
from sglang_reasoncache.kernels.page_logits import page_logits
from sglang_reasoncache.kernels.paged import read_rows
from sglang_reasoncache.selection.quest import Quest

#: How many keys of each head :meth:`PageSelection.written` reads at once, to limit memory.
_AT_ONCE = 1 << 14


class _Rows(NamedTuple):
    """The rows of a forward, copied when it begins. ``pages`` is the number of pages of the longest row."""

    slots: Tensor  # int32 [batch, pages, page]: each position's slot, or -1
    lengths: Tensor  # int64 [batch]
    places: Tensor  # int64 [batch, pages]: number in the pool of each page in place; -1 of others
    newest: Tensor  # int64 [batch, 1]: the page of each row that is being filled
    always: Tensor  # bool [batch, pages]: pages that every layer reads, but for the newest
    counted: Tensor  # int64 [batch, pages]: positions of each page, 0 in rows that are read whole
    bounded: (
        Tensor  # int64 [n]: numbers in the pool of pages whose bounds the forward changes, or -1
    )
    filled: Tensor  # int64 [n]: how many of each such page's first slots have a key
    choose: bool  # whether this is a decode step in which some row may be longer than the budget


class PageSelection:
    """Chooses what decode steps read. Each attention backend has at most one such object.

    A page of a row is *in place* if its positions name the slots of one page of the pool, in order, at the
    positions that these were cached for. Only these pages have bounds. Other pages, of which positions share or
    are evicted, are always read, beside the budget. The newest page is always one of those in the budget.

    Args:
        quest: The policy.
        keys: Layer id -> keys of this layer in the pool, ``[num_slots, kv_heads, dim]``.
        page: Positions of a page.
        rows: ``req_to_token``, int32 ``[num_rows, width]``.
        cached_at: int32 ``[num_slots]``, cached positions. None if keys are read as cached.
        backend: One of ``kernels.paged.BACKENDS``.

    Raises MemoryError if memory for the bounds is missing.
    """

    def __init__(
        self,
        quest: Quest,
        keys: Mapping[int, Tensor],
        page: int,
        rows: Tensor,
        cached_at: Tensor | None,
        backend: str,
    ) -> None:
        self._quest = quest
        self._page = page
        self._table = rows
        self._cached_at = cached_at
        self._backend = backend
        self._num_slots = next(iter(keys.values())).shape[0]
        selecting = sorted(keys)[quest.whole_layers :]
        self._keys = {layer: keys[layer] for layer in selecting}
        try:
            #: Layer id -> ``[num_pages + 1, kv_heads, 2 * dim]``: the largest keys of each page, then the
            #: smallest. What is written for pages that are not in place goes to the last row, which nobody
            #: reads.
            self.bounds = {layer: self._empty(of) for layer, of in self._keys.items()}
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        self._rows: _Rows | None = None
        # bool [num_rows]: rows of requests that read everything (:meth:`admit`).
        self._whole = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        # Of rows beyond the budget: positions held, positions read. Added up over layers and steps.
        self._totals = torch.zeros(2, dtype=torch.int64, device=rows.device)
        self._arriving: Download | None = None
        self._counted = [0, 0]

    def _empty(self, keys: Tensor) -> Tensor:
        slots, heads, dim = keys.shape
        # Not every operator of PyTorch supports fp8.
        dtype = torch.bfloat16 if keys.dtype.itemsize == 1 else keys.dtype
        pages = -(-slots // self._page)
        return torch.zeros(pages + 1, heads, 2 * dim, dtype=dtype, device=keys.device)

    @property
    def budget(self) -> int:
        """How many positions a layer reads of a row. Shorter rows are read whole."""
        return self._quest.budget

    @property
    def nbytes(self) -> int:
        """Bytes of all bounds."""
        return sum(bounds.nbytes for bounds in self.bounds.values())

    def graph_bytes(self, batch: int, heads: int) -> int:
        """About how many bytes a decode graph of ``batch`` requests takes for the choice, whose layers have
        ``heads`` query heads: for a row's positions slots, plan and what :meth:`begin` compares, for its pages
        logits and softmax."""
        return batch * self._table.shape[1] * (42 + 8 * heads // self._page)

    def newly_counted(self) -> tuple[int, int]:
        """Of rows beyond the budget, added up over layers and steps since the last call: how many positions
        they held and how many of these were read. Without a wait: on a GPU, as of an earlier call."""
        if self._arriving is None:
            # A copy, because in host memory a download is no copy.
            self._arriving = Download(self._totals.clone())
        if not self._arriving.ready():
            return 0, 0
        before = self._counted
        self._counted = self._arriving.host[0].tolist()
        self._arriving = None
        return self._counted[0] - before[0], self._counted[1] - before[1]

    def admit(self, requests: Tensor, whole: Sequence[bool]) -> None:
        """Requests are about to be prefilled. ``requests``: int ``[batch]``, index of each request's row.
        ``whole``: whether every layer reads all of that row, because the request opted out."""
        flags = upload(whole, self._whole.device, torch.bool)
        self._whole[requests.long()] = flags

    # -- a forward ------------------------------------------------------------------

    def forget(self) -> None:
        """No forward has begun."""
        self._rows = None

    def begin(self, requests: Tensor, lengths: Tensor, longest: int, *, decodes: bool) -> None:
        """A forward begins. The positions of its new tokens are recorded.

        Args:
            requests: int ``[batch]``, index of each request's row.
            lengths: int ``[batch]``, of each row, with the new tokens.
            longest: At least the largest of ``lengths``.
            decodes: Whether this is a decode step: each row has one new token.
        """
        page = self._page
        width = min(longest, self._table.shape[1])
        pages = -(-width // page)
        # Copies: SGLang counts lengths up while a forward runs, and the scheduler changes rows.
        ends = lengths.long()[:, None].clamp(max=width)
        slots = F.pad(self._table[requests.long(), :width], (0, pages * page - width), value=-1)
        at = torch.arange(pages * page, dtype=torch.int32, device=slots.device)
        inside = at < ends
        held = inside & (slots >= 0) & (slots < self._num_slots)
        slots = slots.masked_fill(~held, -1)
        by_page = slots.view(-1, pages, page)
        first = by_page[:, :, 0]
        in_place = by_page == first[:, :, None] + at[:page]
        if self._cached_at is not None:
            in_place &= (self._cached_at[slots.clamp_min(0)] == at).view_as(in_place)
        whole = (in_place | ~inside.view_as(in_place)).all(dim=2)
        whole &= (first >= 0) & (first % page == 0)
        places = torch.where(whole, first.long() // page, -1)
        newest = (ends - 1).clamp_min(0) // page
        within = (ends <= self._quest.budget) | self._whole[requests.long()][:, None]
        if decodes:
            bounded = places.gather(1, newest)
            filled = ends - newest * page
        else:
            bounded = places
            filled = (ends - at[::page]).clamp(0, page)
        self._rows = _Rows(
            slots=by_page,
            lengths=ends[:, 0],
            places=places,
            newest=newest,
            always=(places < 0) | within,
            counted=held.view_as(by_page).sum(dim=2).masked_fill(within, 0),
            bounded=bounded.flatten(),
            filled=filled.flatten(),
            choose=decodes and width > self._quest.budget,
        )

    # -- a layer --------------------------------------------------------------------

    def written(self, layer: int) -> None:
        """The forward's keys of a layer are in the pool. Brings the bounds of its pages up to date: in a decode
        step those of each row's newest page, else those of all pages, since prefixes may come from anywhere:
        from the prefix cache, or from the host."""
        rows = self._rows
        if rows is None or layer not in self._keys:
            return
        pages = max(1, _AT_ONCE // self._page)
        for some, filled in zip(rows.bounded.split(pages), rows.filled.split(pages), strict=True):
            self._bound(layer, some, filled)

    def _bound(self, layer: int, places: Tensor, counts: Tensor) -> None:
        """Compute the bounds of pages. ``places``: int64 ``[n]``, -1 for none. ``counts``: int64 ``[n]``, how
        many of each page's first slots count."""
        bounds = self.bounds[layer]
        at = torch.arange(self._page, device=places.device)
        slots = (places[:, None].clamp_min(0) * self._page + at).clamp_max(self._num_slots - 1)
        keys = read_rows(self._keys[layer], slots)
        beyond = (at >= counts[:, None])[..., None, None]
        high = keys.masked_fill(beyond, -math.inf).amax(dim=1)
        low = keys.masked_fill(beyond, math.inf).amin(dim=1)
        to = torch.where(places >= 0, places, len(bounds) - 1)
        bounds[to] = torch.cat((high, low), dim=2).to(bounds.dtype)

    def choose(self, layer: int, query: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
        """What a layer of a decode step reads: rows with the slots of chosen pages and -1 at other positions,
        int32 ``[batch, pages * page]``, and their lengths, int64 ``[batch]``. None: everything.

        Args:
            query: ``[batch, heads, dim]``.
            scale: Factor of the logits.
        """
        rows = self._rows
        if rows is None or not rows.choose or layer not in self._keys:
            return None
        logits = page_logits(
            query, self.bounds[layer][:-1], rows.places, scale, backend=self._backend
        )
        # A row may have no page in place: its softmax is NaN, and everything is read.
        shares = logits.softmax(dim=2).nan_to_num_(0.0).sum(dim=1)
        keep = self._best(rows, shares) | rows.always
        self._totals += torch.stack((rows.counted.sum(), (rows.counted * keep).sum()))
        return torch.where(keep[:, :, None], rows.slots, -1).flatten(1), rows.lengths

    def _best(self, rows: _Rows, shares: Tensor) -> Tensor:
        """bool ``[batch, pages]``: the pages with the largest ``shares``, as many as the budget has, and the
        newest page among them."""
        shares = shares.masked_fill(rows.places < 0, -math.inf)
        shares = shares.scatter(1, rows.newest, math.inf)
        count = min(math.ceil(self._quest.budget / self._page), shares.shape[1])
        best = shares.topk(count, dim=1).indices
        return torch.zeros_like(shares, dtype=torch.bool).scatter_(1, best, True)
