# SPDX-License-Identifier: Apache-2.0
"""Blocks that depend on each other are applied one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_reasoncache.sharing.decision import BlockProposal
from sglang_reasoncache.sharing.pipeline import in_batches


def _block(dst: int, src: int, length: int = 4) -> BlockProposal:
    nobody: Any = None
    return BlockProposal(nobody, dst, src, length)


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        ([[(20, 0), (24, 4), (40, 8)]], [3]),
        # The second block reads slots that the first one gives away.
        ([[(20, 0), (40, 22)]], [1, 1]),
        # Another request's blocks go into the same passes.
        ([[(20, 0), (40, 20)], [(8, 0)]], [2, 1]),
    ],
)
def test_batches(requests: list[list[tuple[int, int]]], sizes: list[int]) -> None:
    batches: list[list[BlockProposal]] = []
    for pairs in requests:
        in_batches([_block(*pair) for pair in pairs], batches)
    assert [len(batch) for batch in batches] == sizes


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), max_size=12))
def test_no_batch_holds_a_block_and_its_source(pairs: list[tuple[int, int]]) -> None:
    """Whatever the chain, no block is located before its source's redirection was applied."""
    blocks = [_block(4 * (16 + i), 4 * min(src, 15 + i)) for i, (_, src) in enumerate(pairs)]
    batches: list[list[BlockProposal]] = []
    in_batches(blocks, batches)
    assert sorted(b.dst_start for w in batches for b in w) == [b.dst_start for b in blocks]
    done: set[int] = set()
    pending = {at for b in blocks for at in range(b.dst_start, b.dst_end)}
    for batch in batches:
        for block in batch:
            sources = set(range(block.src_start, block.src_start + block.length))
            assert not sources & (pending - done)
        done |= {at for b in batch for at in range(b.dst_start, b.dst_end)}
