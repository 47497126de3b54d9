# SPDX-License-Identifier: Apache-2.0
"""Checks that merged plans, which read a slot once for several positions, contain every use of a key once."""

from collections import Counter
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.kernels.plan import plan_rows
from sglang_reasoncache.kernels.row_plan import TILE, RowPlan
from tests.triton_runs import DEVICE, INTERPRETED, on_device

#: Arguments of :func:`plan_rows` for a batch: rows, requests, lengths and cached positions.
Read: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
#: How often each key is used, by request, slot and shift (position of the use minus cached position).
Uses = Counter[tuple[int, int, int]]
#: The pieces of a row. A piece has the kind of its slots, their number, and a number that picks a position.
PIECES = st.lists(
    st.tuples(
        st.sampled_from(("own", "earlier", "another's", "evicted", "backwards")),
        st.integers(1, 90),
        st.integers(0, 10**6),
    ),
    min_size=1,
    max_size=8,
)

#: How many of a row's newest positions a query reads, as in a sliding window; 0 means all.
REACHES = st.sampled_from((0, 0, 1, 5, 64, 65, 150, 1000))


def lay(batch: list[list[tuple[str, int, int]]]) -> Read:
    cached_at = [0]
    rows = []
    for pieces in batch:
        row = list[int]()
        for kind, count, pick in pieces:
            if kind == "evicted":
                row += [-1] * count
            elif kind == "earlier" and row:
                begin = pick % len(row)
                row += row[begin : begin + count]
            elif kind == "backwards" and row:
                row += row[-(pick % len(row)) - 1 :: -1][:count]
            else:
                at = len(row) if kind == "own" else pick % 300
                row += range(len(cached_at), len(cached_at) + count)
                cached_at += range(at, at + count)
        rows.append(row)
    width = max(map(len, rows))
    table = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
    lengths = torch.tensor([len(row) for row in rows])
    return table, torch.arange(len(rows)), lengths, torch.tensor(cached_at, dtype=torch.int32)


def of_rows(
    rows: torch.Tensor, _: Any, lengths: torch.Tensor, cached_at: torch.Tensor, *, reach: int = 0
) -> Uses:
    return Counter(
        (request, slot, position - int(cached_at[slot]))
        for request, row in enumerate(rows.tolist())
        for position, slot in enumerate(row[: lengths[request]])
        if slot >= 0 and not 0 < reach <= lengths[request] - position - 1
    )


def of_plan(plan: RowPlan) -> Uses:
    assert plan.shift is None
    found: Uses = Counter()
    indptr = plan.kv_indptr.tolist()
    slots = plan.kv_indices.tolist()
    for request, (begin, end) in enumerate(pairwise(indptr)):
        for first in range(begin, end, TILE):
            keys = list(enumerate(slots[first : min(first + TILE, end)]))
            uses = [(0, -1)]
            if plan.rotations is not None:
                tile = begin // TILE + request + (first - begin) // TILE
                at, last = plan.rotations.tile_ptr[tile : tile + 2].tolist()
                pairs = zip(plan.rotations.by.tolist(), plan.rotations.bits.tolist(), strict=True)
                uses = list(pairs)[at:last] or uses
            assert uses[0][0] == 0
            found.update(
                (request, slot, by) for by, bits in uses for bit, slot in keys if bits >> bit & 1
            )
    return found


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(PIECES, min_size=1, max_size=4), reach=REACHES)
def test_a_plan_has_each_use_of_a_key_once(
    batch: list[list[tuple[str, int, int]]], reach: int
) -> None:
    read = lay(batch)
    slots = len(read[3])
    expected = of_rows(*read, reach=reach)
    found = plan_rows(*read, num_slots=slots, reach=reach, merge=True)
    assert of_plan(found) == expected
    # If a row names a slot at the slot's cached position, the plan has exactly one entry for this slot.
    own = Counter((request, slot) for request, slot, by in expected if not by)
    requests = torch.arange(len(batch)).repeat_interleave(found.kv_indptr.diff())
    entries = Counter(zip(requests.tolist(), found.kv_indices.tolist(), strict=True))
    assert all(entries[one] == 1 for one in own)


@on_device
@settings(max_examples=12 if INTERPRETED else 150, deadline=None)
@given(batch=st.lists(PIECES, min_size=1, max_size=3), reach=REACHES)
def test_a_plan_on_a_gpu(batch: list[list[tuple[str, int, int]]], reach: int) -> None:
    from sglang_reasoncache.kernels.plan_triton import PlanBuffers, plan_into

    read = lay(batch)
    buffers = PlanBuffers.of(len(batch), int(read[2].sum()), DEVICE, merge=True)
    sides: Any = (side.to(DEVICE) for side in read)
    plan = plan_into(buffers, *sides, num_slots=len(read[3]), reach=reach)
    assert of_plan(plan) == of_rows(*read, reach=reach)
