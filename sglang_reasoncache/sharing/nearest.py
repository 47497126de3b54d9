# SPDX-License-Identifier: Apache-2.0
"""Chooses which of several alternative block pairs share (``align=nearest``)."""

import math
from collections.abc import Sequence


def nearest_pairs(pairs: Sequence[tuple[int, int]], distances: Sequence[float]) -> list[int]:
    """MemShare's pairing: takes the pair with the least KV distance, then the least of those that have no block
    in common with it, and so on. Takes ``O(n log n)`` operations for ``n`` pairs.

    Args:
        pairs: The first positions of the two blocks of each pair. Blocks overlap only if they are the same.
        distances: The KV distance of each pair. NaN counts as infinite. Of equal distances the first wins.

    Returns:
        The indexes of the chosen pairs, ascending.
    """
    readers: set[int] = set()
    sources: set[int] = set()
    chosen = []
    for i in sorted(range(len(pairs)), key=lambda i: _or_infinite(distances[i])):
        reader, source = pairs[i]
        if reader not in readers and source not in sources:
            readers.add(reader)
            sources.add(source)
            chosen.append(i)
    return sorted(chosen)


def _or_infinite(distance: float) -> float:
    return math.inf if math.isnan(distance) else distance
