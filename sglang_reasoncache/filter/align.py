# SPDX-License-Identifier: Apache-2.0
"""Pairs blocks of a step with blocks of an earlier step, by their tokens or by index."""

from bisect import bisect_left
from typing import NamedTuple

from sglang_reasoncache.filter.segment import Step
from sglang_reasoncache.filter.settings import AlignMode


class BlockPair(NamedTuple):
    """A block that may read the slots of another one: positions of their first tokens in prompt plus
    output."""

    dst_start: int
    src_start: int


class AcrossPair(NamedTuple):
    """A block that may read the slots of a block of the request ``source``, which may be the same
    request. ``source`` is an id from :meth:`FilterProcess.open`."""

    dst_start: int
    src_start: int
    source: int


def align_blocks(
    dst: Step,
    src: Step,
    block: int,
    page_size: int = 1,
    mode: AlignMode = "tokens",
    covered: bytes | bytearray = b"",
) -> list[BlockPair]:
    """Pair blocks of ``dst`` with blocks of ``src``. The pairs are ascending in ``dst_start``, and their
    ``dst`` blocks do not overlap.

    Args:
        block: Tokens per block.
        page_size: If above 1, blocks are whole pages inside both steps, and ``block`` equals ``page_size``.
        mode: ``tokens`` pairs blocks of equal tokens, greedily from the left. If several blocks of
            ``src`` are equal, the one that continues the last pair is taken (for the first pair: the
            one at the same offset), else the nearest later one, else the first one. A ``src`` block may
            be paired twice. Linear, except for a binary search among equal blocks.
            ``index`` pairs the k-th blocks of both steps, whatever their tokens, as the papers do.
        covered: One byte per token of ``dst``, 0 or 1; blocks with a 1 are left out.
    """
    if mode == "index":
        starts = (block_starts(step, block, page_size) for step in (dst, src))
        return [
            BlockPair(i, j)
            for i, j in zip(*starts, strict=False)
            if covered.find(1, i - dst.start, i - dst.start + block) < 0
        ]
    first = -src.start % page_size
    # Offsets of every block of the source by its tokens, ascending.
    sources: dict[tuple[int, ...], list[int]] = {}
    for j in range(first, len(src) - block + 1, page_size):
        sources.setdefault(src.token_ids[j : j + block], []).append(j)
    pairs: list[BlockPair] = []
    i = -dst.start % page_size
    diagonal = first - i
    while i <= len(dst) - block:
        taken = covered.rfind(1, i, i + block)
        found = sources.get(dst.token_ids[i : i + block]) if taken < 0 else None
        if found is None:
            # Go on at the next place of the page grid that is behind the covered tokens.
            i += -(-max(1, taken + 1 - i) // page_size) * page_size
            continue
        at = bisect_left(found, i + diagonal)
        j = found[at] if at < len(found) else found[0]
        diagonal = j - i
        pairs.append(BlockPair(dst.start + i, src.start + j))
        i += block
    return pairs


def block_starts(step: Step, block: int, page_size: int) -> range:
    """First positions of the step's consecutive blocks, from its first page boundary on."""
    first = step.start + -step.start % page_size
    return range(first, step.end - block + 1, block)
