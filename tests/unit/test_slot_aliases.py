# SPDX-License-Identifier: Apache-2.0
"""Blocks that depend on each other are applied one after the other; the others together."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reasoncache.cache.slot_aliases import SlotAliases
from sglang_reasoncache.sharing.decision import BlockProposal
from sglang_reasoncache.sharing.pipeline import independent
from sglang_reasoncache.sharing.state import RequestState, attach, state_of

_LENGTH = 4


def _request() -> Any:
    req: Any = SimpleNamespace()
    attach(req, RequestState())
    return req


def _redirect(blocks: list[BlockProposal]) -> None:
    for block in blocks:
        state = state_of(block.req)
        assert state is not None
        state.slot_aliases.redirect(block.dst_start, block.src_start, block.length)


def _in_batches(blocks: list[BlockProposal]) -> list[int]:
    """Sizes of the batches in which ``blocks`` were applied."""
    sizes = []
    while blocks:
        batch, blocks = independent(blocks)
        _redirect(batch)
        sizes.append(len(batch))
    return sizes


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([[(20, 0), (24, 4), (40, 8)]], [3]),
        # The second block reads slots that the first one gives away, from either end.
        ([[(20, 0), (40, 22)]], [1, 1]),
        ([[(0, 20), (40, 2)]], [1, 1]),
        # It gives away slots that the first one reads.
        ([[(0, 20), (20, 40)]], [1, 1]),
        ([[(20, 0), (40, 0)]], [2]),
        # Another request's blocks go into the same batches.
        ([[(20, 0), (40, 20)], [(8, 0)]], [2, 1]),
    ],
)
def test_batches(requests: list[list[tuple[int, int]]], sizes: list[int]) -> None:
    blocks = []
    for pairs in requests:
        req = _request()
        blocks += [BlockProposal(req, dst, src, _LENGTH) for dst, src in pairs]
    assert _in_batches(blocks) == sizes


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=16))
def test_batches_do_what_one_block_after_the_other_does(pairs: list[tuple[int, int]]) -> None:
    kept = [pair for pair in pairs if abs(pair[0] - pair[1]) >= _LENGTH]
    one, together = _request(), _request()
    _redirect([BlockProposal(one, *pair, _LENGTH) for pair in kept])
    _in_batches([BlockProposal(together, *pair, _LENGTH) for pair in kept])
    at = np.arange(64)
    assert (one_of(one).of(at) == one_of(together).of(at)).all()


def one_of(req: Any) -> SlotAliases:
    state = state_of(req)
    assert state is not None
    return state.slot_aliases


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 6)), max_size=12))
def test_all_readers_of_a_slot_move_with_it(blocks: list[tuple[int, int, int]]) -> None:
    aliases, row = SlotAliases(), list(range(48))
    for dst, src, length in blocks:
        if abs(dst - src) < length:
            continue
        before = row.copy()
        moved = aliases.redirect(dst, src, length)
        for offset in range(length):
            old, new = row[dst + offset], row[src + offset]
            row = [new if slot == old else slot for slot in row]
        assert {at for at, _ in moved} == {
            at for at, (a, b) in enumerate(zip(before, row, strict=True)) if a != b
        }
        assert all(row[at] == row[src + offset] for at, offset in moved)
    numbers = aliases.of(np.arange(48))
    assert len(set(zip(numbers.tolist(), row, strict=True))) == len(set(row)) == len(set(numbers))
