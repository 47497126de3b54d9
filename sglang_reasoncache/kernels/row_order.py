# SPDX-License-Identifier: Apache-2.0
"""Entries of one slot near each other, so that its second read comes from the cache.

Attention sums over entries and knows positions only by shift, so any order of a
request's entries is right. Order of positions puts two uses of a slot as far
apart as the positions. Here entries go by

    (home // 64, shift), and as they came where these are equal

home being the position a slot's key was computed for.

- A window of 64 cached positions is read as a whole before the next: the uses of a slot
  are at most the entries of its window apart, a few tiles, whatever the positions.
- By home and not by slot number: requests that decode together get slots in turn, so
  that neighbouring slots are other requests' and a window of them holds little of one.
- Inside a window the shift comes first. Uses of one slot side by side to the letter would
  alternate shifts from entry to entry, and what decode pays for moved keys is the runs
  of equal shift. This way a window has as many runs as it has shifts.

Rows in which nothing is moved stay in the order of positions and cost no sort. Where
no homes are known (keys are read as cached), entries go by their slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Cached positions are taken together without this many low bits.
WINDOW_BITS = 6


def order_key(
    slots: torch.Tensor, cached_at: torch.Tensor | None, shift: torch.Tensor | None
) -> torch.Tensor:
    """int64 by which entries are sorted, stably.

    Args:
        slots: int32, not below 0.
        home: int32 of all slots, None where it is not known.
        shift: int32 of the entries, None where all are 0.
    """
    if cached_at is None:
        return slots.long()
    by = 0 if shift is None else shift.long()
    return (cached_at[slots.long()].long() >> WINDOW_BITS << 32) + by


def together(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    shift: torch.Tensor | None,
    cached_at: torch.Tensor | None,
) -> torch.Tensor:
    """int64 ``[total]``, the entries of a plan in this module's order, request by request.

    Args:
        home: That the plan was made with.
    """
    total = kv_indices.shape[0]
    at = torch.arange(total, device=kv_indices.device)
    if shift is None and cached_at is not None:
        return at
    request = torch.searchsorted(kv_indptr[1:], at, right=True, out_int32=True)
    key = order_key(kv_indices, cached_at, shift)
    if shift is not None:
        shifted = torch.zeros(kv_indptr.shape[0], dtype=torch.bool, device=at.device)
        shifted[request[shift != 0]] = True
        key = torch.where(shifted[request], key, at)
    order = key.argsort(stable=True)
    return order[request[order].argsort(stable=True)]


class RowOrder:
    """The order of every row, kept on the device from step to step.

    Sorting all rows for every step would cost more than it saves. A row changes
    where it is shared, which is rare, and grows at its end: each is sorted when it
    changed, and what it gained since follows in order of positions. A row that is
    shorter than when it was sorted (given to a new request) is read in order of
    positions, so a stale order is slower but never wrong.

    Takes as much memory as the rows: 4 bytes a position.

    Args:
        num_rows, width: Of ``req_to_token``.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device | str) -> None:
        #: int32 ``[num_rows, width]``: the position that comes i-th.
        self.positions = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        #: int32 ``[num_rows]``: how many of them are valid, a permutation of the first positions.
        self.counts = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def sort(
        self,
        rows: torch.Tensor,
        requests: Sequence[int],
        lengths: Sequence[int],
        cached_at: torch.Tensor | None,
        *,
        num_slots: int,
    ) -> None:
        """Sort the rows of some requests; waits for nothing.

        Args:
            rows, home: See :func:`sglang_reasoncache.kernels.plan.plan_rows`.
            requests: Indices of rows.
            lengths: Positions in use of each.
        """
        for request, length in zip(requests, lengths, strict=True):
            slots = rows[request, :length]
            at = torch.arange(length, device=rows.device)
            used = (slots >= 0) & (slots < num_slots)
            slots = torch.where(used, slots, 0)
            shift = (
                None if cached_at is None else torch.where(used, at - cached_at[slots.long()], 0)
            )
            key = torch.where(
                used, order_key(slots, cached_at, shift), torch.iinfo(torch.int64).max
            )
            if shift is not None:
                key = torch.where((shift != 0).any(), key, at)
            self.positions[request, :length] = key.argsort(stable=True).to(torch.int32)
            self.counts[request] = length

    def forget(self, request: int) -> None:
        """The row is in order of positions again."""
        self.counts[request] = 0
