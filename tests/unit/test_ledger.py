# SPDX-License-Identifier: Apache-2.0
"""Tests ``Ledger`` against a list that is sorted by KV distance, then by order of arrival."""

import gc
import weakref
from array import array
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_reasoncache.cache.host_row import HostRow
from sglang_reasoncache.compat.carriers import RECORD
from sglang_reasoncache.sharing import ledger as module
from sglang_reasoncache.sharing.blocks import BlockProposal, Candidate, Run
from sglang_reasoncache.sharing.ledger import Ledger
from sglang_reasoncache.sharing.request import RequestRecord

REQUESTS = 3
WHO = st.integers(0, REQUESTS - 1)
#: Who reads, whose slots, tokens of the block, KV distance. Few distances, so that some are equal.
ADD = st.tuples(WHO, WHO, st.sampled_from((4, 8)), st.sampled_from((0.0, 0.5, 1.0)))
#: "take", "clear", or which of the ledger's blocks to remove.
STEPS = st.lists(ADD | st.sampled_from(("take", "take", "clear")) | st.integers(0, 99), max_size=60)


class Entry(NamedTuple):
    """A block in the ledger of the model."""

    distance: float
    arrival: int
    block: BlockProposal


def _request(name: str) -> Req:
    req = Req(name, "", array("q", [1, 2, 3]), SamplingParams())
    setattr(req, RECORD, RequestRecord())
    return req


def _block(req: Req, lender: Req, length: int) -> BlockProposal:
    return BlockProposal(req, Candidate((Run(8, 24, length),)), HostRow(), lender, HostRow())


def _check(ledger: Ledger, entries: list[Entry], reqs: list[Req]) -> None:
    assert len(ledger) == len(entries)
    assert ledger.slots == sum(entry.block.length for entry in entries)
    arrived = [entry.block for entry in sorted(entries, key=lambda entry: entry.arrival)]
    for req in reqs:
        assert ledger.of(req) == [block for block in arrived if req in (block.req, block.lender)]


@settings(max_examples=400, deadline=None)
@given(STEPS)
def test_a_ledger_is_a_sorted_list(steps: list[tuple[int, int, int, float] | str | int]) -> None:
    reqs = [_request(str(number)) for number in range(REQUESTS)]
    ledger = Ledger()
    entries: list[Entry] = []
    with pytest.MonkeyPatch.context() as patch:
        # So that the heap is rebuilt without the blocks that were removed.
        patch.setattr(module, "_DEAD", 1)
        for arrival, step in enumerate(steps):
            if step == "take":
                taken = ledger.take()
                first = min(entries, default=None)
                assert taken is (None if first is None else first.block)
                entries = [entry for entry in entries if entry is not first]
            elif step == "clear":
                ledger.clear()
                entries = []
            elif isinstance(step, tuple):
                reader, lender, length, distance = step
                block = _block(reqs[reader], reqs[lender], length)
                ledger.add(block, distance)
                entries.append(Entry(distance, arrival, block))
            elif isinstance(step, int) and entries:
                gone = entries.pop(step % len(entries))
                ledger.remove(gone.block)
            _check(ledger, entries, reqs)
            assert len(ledger._queue) <= 2 * len(entries) + 2, "removed blocks are forgotten"


def test_a_removed_block_keeps_no_request_alive() -> None:
    """The ledger of an idle server may never change again."""
    ledger = Ledger()
    stays = _request("stays")
    ledger.add(_block(stays, stays, 8), 0.5)
    reader = _request("reader")
    lender = _request("lender")
    block = _block(reader, lender, 8)
    ledger.add(block, 1.0)
    held = [*map(weakref.ref, (reader, lender, block.row, block.lender_row))]
    ledger.remove(block)
    del reader, lender, block
    gc.collect()
    assert [each() for each in held] == [None] * 4
    assert len(ledger) == 1 and ledger.slots == 8


def test_a_request_that_no_poll_has_seen_has_no_blocks() -> None:
    ledger = Ledger()
    req = Req("r", "", array("q", [1]), SamplingParams())
    assert ledger.of(req) == [] and ledger.take() is None
