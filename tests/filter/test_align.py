# SPDX-License-Identifier: Apache-2.0
"""Block pairs: equal tokens, in range, never overlapping, and the stated choices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_reasoncache.filter.align import AlignMode, BlockPair, align_blocks
from sglang_reasoncache.filter.segment import Step
from tests.filter.words import step_of

_TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@settings(deadline=None)
@given(_TOKENS, _TOKENS, st.integers(0, 9), st.integers(50, 59), st.integers(1, 6),
       st.booleans(), st.sampled_from(["tokens", "index"]), st.data())  # fmt: skip
def test_pairs_are_sound(
    src_ids: list[int], dst_ids: list[int], src_start: int, dst_start: int, block: int,
    is_paged: bool, mode: AlignMode, data: st.DataObject,
) -> None:  # fmt: skip
    """In range, on the grid, clear of covered tokens, ascending, without overlap."""
    page_size = block if is_paged else 1
    src, dst = step_of(src_ids, src_start), step_of(dst_ids, dst_start)
    flags = data.draw(
        st.lists(st.sampled_from([0, 0, 0, 0, 1]), min_size=len(dst), max_size=len(dst))
    )
    covered = bytearray(flags)
    pairs = align_blocks(dst, src, block, page_size, mode, covered)
    assert bytes(covered) == bytes(flags)
    free_from = dst.start
    for pair in pairs:
        i, j = pair.dst_start - dst.start, pair.src_start - src.start
        assert pair.dst_start >= free_from
        assert pair.dst_start + block <= dst.end
        assert src.start <= pair.src_start <= src.end - block
        assert not any(flags[i : i + block])
        if page_size > 1:
            assert pair.dst_start % page_size == pair.src_start % page_size == 0
        if mode == "tokens":
            assert dst_ids[i : i + block] == src_ids[j : j + block]
        free_from = pair.dst_start + block


@settings(deadline=None)
@given(_TOKENS, _TOKENS, st.integers(1, 8), st.integers(0, 20))
def test_tokens_mode_misses_nothing(
    src_ids: list[int], dst_ids: list[int], block: int, gap: int
) -> None:
    """Greedy from the left: between two pairs no block of the source occurs. Repeats inside the
    step do not pull a copy off its diagonal."""
    src = step_of(src_ids)
    pairs = align_blocks(step_of(dst_ids, 100), src, block)
    taken = {pair.dst_start - 100 + k for pair in pairs for k in range(block)}
    grams = {tuple(src_ids[j : j + block]) for j in range(len(src_ids) - block + 1)}
    for i in range(len(dst_ids) - block + 1):
        if not taken & set(range(i, i + block)):
            assert tuple(dst_ids[i : i + block]) not in grams
    start = len(src_ids) + gap
    expected = [BlockPair(start + k, k) for k in range(0, len(src_ids) - block + 1, block)]
    assert align_blocks(step_of(src_ids, start), src, block) == expected


@pytest.mark.parametrize(
    ("dst", "src", "block", "expected"),
    [
        ("abcdef", "abcdef", 2, [(0, 0), (2, 2), (4, 4)]),
        ("xabcdef", "abcdef", 2, [(1, 0), (3, 2), (5, 4)]),
        # One token replaced: the diagonal goes on behind it.
        ("abXcdab", "abYcdab", 2, [(0, 0), (3, 3), (5, 5)]),
        # The diagonal does not fit: nearest later occurrence, not the first.
        ("abcd", "cdabxcd", 2, [(0, 2), (2, 5)]),
        # Nothing later: the first.
        ("abcd", "cdcdab", 2, [(0, 4), (2, 0)]),
        # A source block may serve twice.
        ("abab", "abz", 2, [(0, 0), (2, 0)]),
        ("abc", "xyz", 2, []),
        ("ab", "abc", 3, []),
        ("abc", "ab", 3, []),
    ],
)
def test_choices(dst: str, src: str, block: int, expected: list[tuple[int, int]]) -> None:
    """For steps written as one letter a token."""
    found = align_blocks(step_of([*map(ord, dst)], 1000), step_of([*map(ord, src)]), block)
    assert [(i - 1000, j) for i, j in found] == expected


def test_whole_pages_only() -> None:
    """Page 4: the source holds pages 4 and 8, the destination 16 and 20."""
    src: Step = step_of([9, 1, 2, 3, 4, 5, 6, 7, 8, 9], start=3)
    dst: Step = step_of([5, 6, 7, 8, 1, 2, 3, 4, 9], start=16)
    assert align_blocks(dst, src, 4, 4) == [BlockPair(16, 8), BlockPair(20, 4)]
    assert align_blocks(step_of(list(dst.token_ids), start=17), src, 4, 4) == []
    assert align_blocks(dst, src, 4, 4, "index") == [BlockPair(16, 4), BlockPair(20, 8)]


def test_covered_tokens_and_the_kth_blocks_whatever_they_hold() -> None:
    """A covered token takes its whole page out."""
    step = step_of([7] * 12, start=16)
    found = align_blocks(step, step_of([7] * 12), 4, 4, covered=b"\0\1" + bytes(10))
    assert found == [BlockPair(20, 4), BlockPair(24, 8)]
    src, dst = step_of(list(range(7)), start=5), step_of(list(range(90, 100)), start=30)
    for covered, expected in ((b"", [(30, 5), (33, 8)]), (b"\0\1" + bytes(8), [(33, 8)])):
        assert align_blocks(dst, src, 3, mode="index", covered=covered) == expected


def test_a_page_size_of_uniform_tokens_stays_linear() -> None:
    """Every block equals every other: the worst case for looking up occurrences."""
    step = step_of([7] * 20_000)
    later = step_of([7] * 20_000, start=20_000)
    assert len(align_blocks(later, step, 16)) == 20_000 // 16
