# SPDX-License-Identifier: Apache-2.0
"""Attention weights of a forward, added to the statistics of their rows, on a GPU.

One launch whose grid depends on the batch alone, so a CUDA graph can hold it. It finds a row's
memory by its address, which may change between two replays.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_reasoncache.kernels.common_triton import current_device, piece_of
from sglang_reasoncache.kernels.plan_triton import PlanBuffers

#: Programs of a request.
PIECES = 16
#: Entries a program reads at once.
TILE = 256


@triton.jit(do_not_specialize=["num_weights", "num_rows"])
def note_kernel(
    weights,  # fp32 [num_weights], read and zeroed
    num_weights,
    kv_indptr,  # int32 [batch + 1]
    positions,  # int32 [capacity], of the entries
    requests,  # int32 or int64 [batch]
    lengths,  # int32 or int64 [batch]: positions up to each request's last query
    counts,  # int32 [batch]: of its queries that were observed, unused if DECODE
    first,  # int64 [batch]: of their weights, likewise
    added,  # int32 [batch]: positions whose totals go on, likewise
    bases,  # int64 [num_rows]: addresses of the rows' memory, 0: none
    sizes,  # int32 [num_rows]: positions it holds
    num_rows,
    LATEST: tl.constexpr,  # queries kept one by one
    AHEAD: tl.constexpr,  # the next power of 2
    TOTAL: tl.constexpr, DECODE: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (PIECES, batch)."""
    piece = tl.program_id(0)
    request = tl.program_id(1)
    row = tl.load(requests + request).to(tl.int64)
    sound = (row >= 0) & (row < num_rows)
    row = tl.where(sound, row, 0)
    base = tl.where(sound, tl.load(bases + row), 0)
    memory = base.to(tl.pointer_type(tl.float32))
    size = tl.load(sizes + row)
    known = base != 0
    length = tl.load(lengths + request).to(tl.int32)
    begin = tl.load(kv_indptr + request)
    entries = tl.load(kv_indptr + request + 1) - begin
    if DECODE:
        count = tl.full([], 1, tl.int32)
        before = begin.to(tl.int64)
        added_to = length - 1
    else:
        count = tl.load(counts + request)
        before = tl.load(first + request)
        added_to = tl.load(added + request)
    start, stop = piece_of(entries, piece, PIECES, TILE)
    for at in range(start, stop, TILE):
        entry = at + tl.arange(0, TILE)
        inside = entry < entries
        position = tl.load(positions + begin + entry, mask=inside, other=0)
        there = inside & known & (position >= 0) & (position < size)
        sums = tl.zeros([TILE], tl.float32)
        to = before
        for query in range(0, count):
            # The request's newest positions are those of its last queries.
            seen = entries - (count - 1 - query)
            mask = (entry < seen) & (to + entry < num_weights)
            weight = tl.load(weights + to + entry, mask=mask, other=0.0)
            # For the next forward that uses this memory.
            tl.store(weights + to + entry, tl.zeros([TILE], tl.float32), mask=mask)
            sums += weight
            if LATEST > 0:
                place = (length - 1 - (count - 1 - query)) % LATEST
                kept = there & (entry < seen) & (query >= count - LATEST)
                tl.store(memory + place.to(tl.int64) * size + position, weight, mask=kept)
            to += seen
        if TOTAL:
            at_total = memory + tl.full([], LATEST, tl.int64) * size + position
            old = tl.load(at_total, mask=there & (position < added_to), other=0.0)
            tl.store(at_total, old + sums, mask=there)
    if LATEST > 0:  # noqa: SIM102 - known when this is compiled, the next is not
        if piece == 0:
            # Positions after a query have no weight of it: cleared for as many as there will be
            # before its line is written again.
            ahead = tl.arange(0, AHEAD)
            for query in range(tl.maximum(count - LATEST, 0), count):
                seen = length - (count - 1 - query)
                place = ((seen - 1) % LATEST).to(tl.int64)
                behind = (ahead < LATEST) & known & (seen > 0) & (seen + ahead < size)
                zeros = tl.zeros([AHEAD], tl.float32)
                tl.store(memory + place * size + seen + ahead, zeros, mask=behind)


class Prompts(NamedTuple):
    """Which queries of a prefill were observed."""

    counts: torch.Tensor  # int32 [batch], the last queries of each request
    first: torch.Tensor  # int64 [batch], where their weights begin
    added: torch.Tensor  # int32 [batch], positions whose totals go on; others begin anew


def note(
    weights: torch.Tensor,
    plan: PlanBuffers,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    bases: torch.Tensor,
    sizes: torch.Tensor,
    *,
    latest: int,
    total: bool,
    prompts: Prompts | None = None,
) -> None:
    """Add weights, as decode attention left them, to their rows, and zero them.

    The memory of a row is fp32 ``[latest + total, size]``: line ``query % latest`` has the weights
    of that query, the last one the sums over all. Rows without memory and positions past it are
    skipped. Arguments are those of :func:`note_kernel`; ``plan`` has ``positions``, and without
    ``prompts`` there is one query of each request (decode).
    """
    assert plan.positions is not None, "of a plan without positions"
    if not len(requests):
        return
    observed = prompts or [plan.counts] * 3
    entries = plan.kv_indptr, plan.positions, requests, lengths, *observed
    with current_device(weights.device):
        note_kernel[(PIECES, len(requests))](
            *(weights, len(weights)),
            *entries,
            *(bases, sizes, len(bases)),
            LATEST=latest,
            AHEAD=triton.next_power_of_2(max(latest, 1)),
            TOTAL=total,
            DECODE=prompts is None,
            PIECES=PIECES,
            TILE=TILE,
        )
