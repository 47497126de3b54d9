# SPDX-License-Identifier: Apache-2.0
"""Benchmarks; each is a program and writes what it measured under ``build/bench``."""

from collections.abc import Sequence

#: Recorded responses to AIME 2024 and to MATH-500, of the folder that a benchmark is given.
AIME, MATH = "aime24_sky_t1_32b.jsonl", "math500_sky_t1_27b.jsonl"
#: AIME responses with more tokens go round in circles up to the limit of the model that wrote them;
#: the next shorter one has 14,406.
LOOPING = 20_000


def looping_pieces(ids: Sequence[int], size: int, longest: int = LOOPING) -> list[Sequence[int]]:
    """Pieces of ``size`` tokens of a response longer than ``longest``, but of its first ones, up to
    there; none of a shorter one."""
    starts = range(size, longest - size + 1, size) if len(ids) > longest else ()
    return [ids[at : at + size] for at in starts]
