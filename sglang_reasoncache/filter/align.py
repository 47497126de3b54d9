# SPDX-License-Identifier: Apache-2.0
"""Pairing the blocks of a step with blocks of an earlier step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple

from sglang_reasoncache.filter.step import Step

AlignMode = Literal["tokens", "index"]
ALIGN_MODES: tuple[AlignMode, ...] = ("tokens", "index")


class BlockPair(NamedTuple):
    """``block`` consecutive tokens that may share memory.

    Both are logical positions in the request's sequence, of the first token.
    """

    dst_start: int
    src_start: int


def align_blocks(
    dst: Step,
    src: Step,
    block: int,
    page_size: int = 1,
    mode: AlignMode = "tokens",
    covered: bytearray | None = None,
) -> list[BlockPair]:
    """Propose block pairs, in ascending and never overlapping ``dst`` ranges.

    ``tokens``: blocks of equal tokens, greedily from the left. Where the source
    repeats itself, the diagonal of the last pair is kept if it fits (at first
    the one that lays step start on step start), else the nearest later source
    block, else the first. Source blocks may be used more than once. Linear in
    the tokens of both steps but for a binary search over repeats.

    ``index``: the k-th block with the k-th block, tokens unseen, as the papers
    do. At page size 1 blocks are counted from the step's start, else on the
    page grid.

    Args:
        page_size: above 1, blocks are whole pages inside both steps and
            ``block`` must be equal to it.
        covered: one byte per token of ``dst``, 0 or 1; blocks that touch a 1 are
            passed over. Not changed.

    Raises:
        ValueError: a bad size or mode, or ``covered`` of another length.
    """
    if covered is None:
        covered = bytearray(len(dst))
    _check(dst, block, page_size, mode, covered)
    pair_up = _by_index if mode == "index" else _by_tokens
    return pair_up(dst, src, block, page_size, covered)


def _check(dst: Step, block: int, page_size: int, mode: str, covered: bytearray) -> None:
    if block < 1:
        raise ValueError(f"--reasoncache-block must be at least 1, got {block}")
    if page_size < 1 or (page_size > 1 and block != page_size):
        raise ValueError(
            f"--reasoncache-block must equal the page size {page_size} above 1, got {block}"
        )
    if mode not in ALIGN_MODES:
        raise ValueError(
            f"--reasoncache-align must be one of {', '.join(ALIGN_MODES)}, got {mode!r}"
        )
    if len(covered) != len(dst):
        raise ValueError(f"covered must have {len(dst)} bytes, got {len(covered)}")


def grid_blocks(step: Step, block: int, page_size: int) -> Iterator[int]:
    """Offsets in the step of its consecutive blocks: on the page grid, or from its start."""
    return iter(range(-step.start % page_size, len(step) - block + 1, block))


def _by_index(
    dst: Step, src: Step, block: int, page_size: int, covered: bytearray
) -> list[BlockPair]:
    pairs = zip(
        grid_blocks(dst, block, page_size), grid_blocks(src, block, page_size), strict=False
    )
    return [
        BlockPair(dst.start + i, src.start + j)
        for i, j in pairs
        if covered.find(1, i, i + block) < 0
    ]


def _by_tokens(
    dst: Step, src: Step, block: int, page_size: int, covered: bytearray
) -> list[BlockPair]:
    sources = _block_grams(src, block, page_size)
    if not sources:
        return []
    tokens = dst.token_ids
    first = -src.start % page_size
    pairs: list[BlockPair] = []
    i = -dst.start % page_size
    diagonal = first - i
    last = len(dst) - block
    while i <= last:
        taken = covered.rfind(1, i, i + block)
        if taken >= 0:
            i = _next_offset(i, taken + 1, page_size)
            continue
        found = sources.get(tokens[i : i + block])
        if found is None:
            i += page_size
            continue
        j = _choose(found, i + diagonal)
        diagonal = j - i
        pairs.append(BlockPair(dst.start + i, src.start + j))
        i += block
    return pairs


def _block_grams(src: Step, block: int, page_size: int) -> dict[tuple[int, ...], list[int]]:
    """Offsets of every block of the source by its tokens, ascending."""
    tokens = src.token_ids
    found: dict[tuple[int, ...], list[int]] = {}
    for j in range(-src.start % page_size, len(src) - block + 1, page_size):
        found.setdefault(tokens[j : j + block], []).append(j)
    return found


def _choose(found: list[int], wanted: int) -> int:
    """``wanted`` itself, else the nearest later offset, else the first."""
    at = bisect_left(found, wanted)
    return found[at] if at < len(found) else found[0]


def _next_offset(i: int, at_least: int, page_size: int) -> int:
    """The next offset of the grid through ``i`` that is not below ``at_least``."""
    return i + -(-(at_least - i) // page_size) * page_size
