# SPDX-License-Identifier: Apache-2.0
"""Blocks that depend on each other are applied one after the other."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_reasoncache.sharing.decision import BlockProposal
from sglang_reasoncache.sharing.pipeline import in_batches


def _block(dst: int, src: int, length: int = 4) -> BlockProposal:
    nobody: Any = None
    return BlockProposal(nobody, dst, src, length)


def test_independent_blocks_share_one_batch() -> None:
    batches: list[list[BlockProposal]] = []
    in_batches([_block(20, 0), _block(24, 4), _block(40, 8)], batches)
    assert [len(batch) for batch in batches] == [3]


def test_source_redirected_in_the_same_call_waits() -> None:
    """The second block reads slots that the first one gives away."""
    batches: list[list[BlockProposal]] = []
    first, second = _block(20, 0), _block(40, 22)
    in_batches([first, second], batches)
    assert batches == [[first], [second]]


def test_requests_share_batches() -> None:
    """Another request's blocks go into the same passes."""
    batches: list[list[BlockProposal]] = []
    in_batches([_block(20, 0), _block(40, 20)], batches)
    in_batches([_block(8, 0)], batches)
    assert [len(batch) for batch in batches] == [2, 1]


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
